# Sourced by quickstart.sh and run_tests.sh: a Python environment with this package installed.
#
#   use_environment EXTRAS     activates the current virtual environment, or .venv in the repository,
#                              and installs missing dependencies, including those of EXTRAS
#
# NEMO_ALIGNER_PYTHON names the Python that makes .venv (default: the first of 3.11, 3.12, 3.10).
# Without a GPU torch 2.13.0 comes from PyTorch's CPU index: pip's build may install CUDA packages.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
CPU_TORCH="torch==2.13.0"
CPU_INDEX="https://download.pytorch.org/whl/cpu"

has_gpu() {
    command -v nvidia-smi > /dev/null 2>&1 && nvidia-smi -L 2> /dev/null | grep -q GPU
}

_fits='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))'

_find_python() {
    local candidate
    for candidate in "${NEMO_ALIGNER_PYTHON:-python3.11}" python3.12 python3.10 python3 python; do
        if "$candidate" -c "$_fits" > /dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    echo "error: found no Python 3.10, 3.11 or 3.12; install one, or set NEMO_ALIGNER_PYTHON to its path" >&2
    return 1
}

# Environments that uv makes have no pip: installs the one that comes with Python.
_ensure_pip() {
    if ! python -m pip --version > /dev/null 2>&1 &&
        ! python -m ensurepip --default-pip > /dev/null 2>&1; then
        echo "error: $(command -v python) has no pip, and its module ensurepip cannot install it; install pip there (with uv: uv pip install pip), then try again" >&2
        return 1
    fi
}

_pip_install() {
    python -m pip install --quiet --quiet --disable-pip-version-check --no-input \
        --root-user-action=ignore "$@"
}

# Succeeds if all requirements of pyproject.toml, with the extras $1, are installed.
_is_complete() {
    python - "$REPO" "$1" << 'PYTHON'
import importlib.metadata as metadata
import sys
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ImportError:
    sys.exit(1)
if sys.version_info >= (3, 11):
    import tomllib
else:
    try:
        import tomli as tomllib
    except ImportError:
        sys.exit(1)

root, extras = Path(sys.argv[1]), sys.argv[2].split(",")
project = tomllib.loads((root / "pyproject.toml").read_text())["project"]


def requirements_of(names):
    for text in names:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            for extra in requirement.extras:
                yield from requirements_of(project["optional-dependencies"][extra])
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


try:
    metadata.version(project["name"])
except metadata.PackageNotFoundError:
    sys.exit(f"missing: {project['name']}")
requirements = list(requirements_of(project["dependencies"]))
for extra in extras:
    requirements += requirements_of(project["optional-dependencies"][extra])
for requirement in requirements:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        sys.exit(f"missing: {requirement}")
    if not requirement.specifier.contains(version, prereleases=True):
        sys.exit(f"{requirement.name} {version} is not {requirement}")
PYTHON
}

# Makes the environment in the folder $1; without success, no half-made folder remains.
_make_venv() {
    local base options=("$1")
    base="$(_find_python)" || return 1
    echo "making $1 with $("$base" --version)"
    # On a GPU machine the installed torch fits the driver: let the environment use it.
    if has_gpu && "$base" -c "import torch" 2> /dev/null; then
        options=(--system-site-packages "$1")
    fi
    # Debian's Python prints several lines to stdout if it lacks the package that is named below.
    "$base" -m venv "${options[@]}" > /dev/null && return
    if [ ! -f "$1/bin/activate" ]; then
        rm -rf "$1"
    fi
    local package
    package="$("$base" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    echo "error: $base could not make $1; on Debian and Ubuntu install $package (apt install $package), then try again" >&2
    return 1
}

# Keeps an active environment; otherwise activates .venv, and makes it if it does not exist.
_activate() {
    if [ -n "${VIRTUAL_ENV:-}" ] || [ -n "${CONDA_PREFIX:-}" ]; then
        python -c "$_fits" || {
            echo "error: $(python --version) is active, wanted 3.10, 3.11 or 3.12; deactivate this environment" >&2
            return 1
        }
        return
    fi
    local venv="$REPO/.venv"
    # venv writes bin/activate last: a folder without it is half-made.
    if [ ! -x "$venv/bin/python" ] || [ ! -f "$venv/bin/activate" ]; then
        _make_venv "$venv" || return 1
    fi
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

use_environment() {
    local extras="$1"
    _activate || return 1
    export PYTHONPATH="$REPO${PYTHONPATH:+:$PYTHONPATH}"
    if _is_complete "$extras" 2> /dev/null; then
        return
    fi
    _ensure_pip || return 1
    if ! python -c "import torch" 2> /dev/null; then
        if has_gpu; then
            echo "installing torch (a few minutes)"
            _pip_install "torch>=2.8" || return 1
        else
            echo "installing $CPU_TORCH for the CPU (a few minutes)"
            # Only torch itself: its dependencies are installed below from pip's index. If PyTorch's
            # index cannot be reached, pip then tries it once and not for every package.
            _pip_install "$CPU_TORCH" --no-deps --extra-index-url "$CPU_INDEX" --retries 1 || return 1
        fi
    fi
    echo "installing nemo_aligner with $extras and what it needs (a few minutes)"
    _pip_install packaging -e "${REPO}[$extras]" || return 1
    _is_complete "$extras" || return 1
}
