"""What scripts/merge_adapter.py does: merging tensor by tensor, and measuring what that costs."""
