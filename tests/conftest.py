"""Property tests draw the same examples in every run, and keep none on disk."""

import hypothesis

hypothesis.settings.register_profile("project", database=None, derandomize=True, deadline=None)
hypothesis.settings.load_profile("project")
