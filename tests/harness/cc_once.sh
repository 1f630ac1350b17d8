#!/bin/sh
# A C compiler that compiles the same thing once: every process of a user compiles the C kernels for
# its processor (nemo_aligner/cpu/kernels.py), 1.2 s of CPU time, and tests start thousands of them.
# tests/harness/environments.py sets CC to this file. What was compiled stays in the folder
# COMPILED_ONCE, under a hash of the compiler's arguments, the files that it reads, and the processor.
set -eu
output=
previous=
for argument; do
    [ "$previous" = -o ] && output=$argument
    previous=$argument
done
[ -n "$output" ] || exec $COMPILER_FOR_ONCE "$@"
key=$(
    {
        echo "$COMPILER_FOR_ONCE"
        grep -m 1 -E '^(flags|Features)' /proc/cpuinfo || true
        previous=
        for argument; do
            if [ "$previous" = -o ]; then
                :
            elif [ -f "$argument" ]; then
                # A source file and the headers next to it, which it may include.
                cat "$argument" "$(dirname "$argument")"/*.h 2>/dev/null || true
            else
                echo "$argument"
            fi
            previous=$argument
        done
    } | sha256sum
)
compiled=$COMPILED_ONCE/${key%% *}
if [ ! -f "$compiled" ]; then
    $COMPILER_FOR_ONCE "$@"
    cp "$output" "$compiled.$$"
    mv "$compiled.$$" "$compiled"
else
    cp "$compiled" "$output"
fi
