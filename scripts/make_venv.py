"""Make a virtual environment with a Python that is new enough: `python make_venv.py FOLDER`. Runs on any Python 3."""

import os
import shutil
import subprocess
import sys

NEEDED = (3, 11)


def candidates():
    """Interpreters to try: this one, those on PATH, those of pyenv."""
    yield sys.executable
    for minor in (14, 13, 12, 11):
        found = shutil.which("python3.%d" % minor)
        if found:
            yield found
    versions = os.path.expanduser("~/.pyenv/versions")
    if os.path.isdir(versions):
        for name in sorted(os.listdir(versions), reverse=True):
            yield os.path.join(versions, name, "bin", "python3")


def works(python):
    """Whether an interpreter is new enough and can make virtual environments."""
    test = "import sys, ensurepip, venv; sys.exit(sys.version_info < %r)" % (NEEDED,)
    try:
        return subprocess.call([python, "-c", test], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def main():
    """Reuse what is there, else make it."""
    folder = sys.argv[1]
    if os.path.exists(os.path.join(folder, "bin", "python")) and works(os.path.join(folder, "bin", "python")):
        return
    for python in candidates():
        if works(python):
            subprocess.check_call([python, "-m", "venv", "--clear", folder])
            return
    sys.exit(
        "deployctl needs Python %d.%d or newer with venv: apt install python3-venv, or brew install python" % NEEDED
    )


if __name__ == "__main__":
    main()
