#!/bin/sh
# Builds the kernels with a sanitizer, in a temporary folder, and runs their tests there.
#
#   extensions/sanitize.sh address|thread [arguments of pytest]
#
# PYTHON is the Python that has PyTorch and pytest (python). gcc takes minutes to compile.
# A failed test, or what the sanitizer reports, is a failure.
set -eu

usage="usage: $0 address|thread [arguments of pytest]"
kind=${1:?"$usage"}
shift
case $kind in
    address)
        library=libasan.so
        tests="tests/test_ops.py tests/test_extremum.py tests/test_threads.py
               tests/test_attention_ops.py tests/test_factored_backward.py
               tests/test_functional.py tests/test_random_numbers.py"
        ;;
    thread)
        library=libtsan.so
        export OMP_THREAD_LIMIT=1  # of PyTorch's own: their barriers are not known either
        tests=tests/test_threads.py
        ;;
    *)
        echo "$usage (got '$kind')" >&2
        exit 1
        ;;
esac
python=${PYTHON:-python}
here=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cd "$here"
cp -r setup.py setup.cfg pyproject.toml README.md LICENSE extensions pyg_sar tests "$work"
cd "$work"
rm -f pyg_sar/_*.so
PYG_SAR_SANITIZER=$kind "$python" setup.py -q build_ext --inplace
test -f pyg_sar/_kernels.so || { echo "the kernels could not be built" >&2; exit 1; }

# Python leaks by design. Where memory is mapped at random, ThreadSanitizer may find no room.
# Reports go to files, as pytest captures what is printed.
export ASAN_OPTIONS="detect_leaks=0 log_path=$work/report" TSAN_OPTIONS="log_path=$work/report"
export OMP_NUM_THREADS=3 PYTHONPATH=. PYTHONMALLOC=malloc
preload=$(gcc -print-file-name=$library):$(gcc -print-file-name=libstdc++.so)
[ $# -gt 0 ] || set -- $tests
status=0
setarch -R env LD_PRELOAD="$preload" "$python" -m pytest -q -p no:cacheprovider "$@" || status=$?
cat "$work"/report* 2>/dev/null || exit $status
exit 1
