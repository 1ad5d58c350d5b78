#!/bin/sh
# Builds the kernels with a sanitizer, in a temporary folder, and runs their tests there.
#
#   extensions/sanitize.sh address|thread [arguments of pytest]
#
# PYTHON is the Python that has PyTorch and pytest (python). gcc takes minutes to compile.
# A failed test, or what the sanitizer reports, is a failure.
set -eu

kind=${1:?"usage: $0 address|thread [arguments of pytest]"}
shift
python=${PYTHON:-python}
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir "$work/run"
cp -r "$here/setup.py" "$here/setup.cfg" "$here/pyproject.toml" "$here/README.md" \
    "$here/extensions" "$here/pyg_sar" "$here/tests" "$work/run"
rm -f "$work/run/pyg_sar/_kernels.so"
cd "$work/run"
PYG_SAR_SANITIZER=$kind "$python" setup.py -q build_ext --inplace
test -f pyg_sar/_kernels.so || { echo "the kernels could not be built" >&2; exit 1; }

case $kind in
    address) library=libasan.so ;;
    thread) library=libtsan.so ;;
    *) echo "expected 'address' or 'thread' (got '$kind')" >&2; exit 1 ;;
esac
if [ $# -eq 0 ]; then
    # Threads are what the second one is for.
    [ "$kind" = thread ] && set -- tests/test_threads.py
    [ "$kind" = address ] && set -- tests/test_ops.py tests/test_extremum.py tests/test_threads.py \
        tests/test_attention_ops.py tests/test_functional.py
fi

# Python leaks by design. Where memory is mapped at random, ThreadSanitizer may find no room.
export ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS="exitcode=66 halt_on_error=0"
export OMP_NUM_THREADS=3 PYTHONPATH=. PYTHONMALLOC=malloc
preload=$(gcc -print-file-name=$library):$(gcc -print-file-name=libstdc++.so)
setarch -R env LD_PRELOAD="$preload" "$python" -m pytest -q -p no:cacheprovider "$@"
