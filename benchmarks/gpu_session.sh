#!/usr/bin/env bash
# One visit to a machine with an NVIDIA GPU and no network: unpack wheels, run the tests and the benchmarks, keep the logs.
#
#     benchmarks/gpu_session.sh [-w WHEELS]... [-s SITE] [-t SECONDS] [STEP...]
#
# Run it in the repository. The machine has python3 with torch; what else is needed lies as wheels in the folders WHEELS
# (default: .whl) and is installed into SITE (default: build/site), beside what is there, which is left alone. A wheel
# that came in pieces, NAME.whl.part-00, NAME.whl.part-01 and so on, is put together first, from all folders at once.
# STEPs, in order, default all: unpack rtx test bench calibration devices engines. The last two want the trained networks
# of benchmarks/zoo.py in the folder ZOO, and are left out without it. Everything is written to $OUT (default: out/gpu):
# session.log, and $OUT/benchmarks/results. Each step is given SECONDS (default: 540); one that fails does not keep the
# next from running, and the exit status says so at the end. `bench` prepares its networks together; its arguments go
# into ARGS, so that a long table can be made in several visits: ARGS="--models resnet50" benchmarks/gpu_session.sh bench
set -euo pipefail

wheels=()
site=build/site
limit=540
while getopts "w:s:t:" option; do
    case $option in
        w) wheels+=("$OPTARG") ;;
        s) site=$OPTARG ;;
        t) limit=$OPTARG ;;
        *) sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
done
shift $((OPTIND - 1))
[ ${#wheels[@]} -gt 0 ] || wheels=(.whl)
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(unpack rtx test bench calibration ${ZOO:+devices engines})

out=${OUT:-out/gpu}
mkdir -p "$out/benchmarks/results" "$site"
out=$(cd "$out" && pwd)
site=$(cd "$site" && pwd)
results=$out/benchmarks/results
# `make` takes an environment by its bin folder. A script in it hands over to python3 and all that python3 can import.
environment=$site/.environment
mkdir -p "$environment/bin"
printf '#!/bin/sh\nexec %q "$@"\n' "$(command -v python3)" >"$environment/bin/python"
chmod +x "$environment/bin/python"
export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

unpack() {
    local whole=$site/.wheels folder part name
    mkdir -p "$whole"
    for folder in "${wheels[@]}"; do
        [ -d "$folder" ] || { echo "no folder $folder" >&2; return 1; }
        find "$folder" -maxdepth 1 -name '*.whl' -exec cp -n {} "$whole" \;
    done
    while IFS= read -r name; do
        [ -n "$name" ] || continue
        find "${wheels[@]}" -maxdepth 1 -name "$name.part-*" -printf '%f\t%p\n' | sort | cut -f2 |
            while IFS= read -r part; do cat "$part"; done >"$whole/$name"
    done < <(find "${wheels[@]}" -maxdepth 1 -name '*.whl.part-*' -printf '%f\n' | sed 's/\.part-[0-9]*$//' | sort -u)
    if ! find "$whole" -name '*.whl' | grep -q .; then
        echo "no wheels: what is installed here is used as it is"
    elif python3 -m pip --version >/dev/null 2>&1; then
        find "$whole" -name '*.whl' -print0 | xargs -0 python3 -m pip install --quiet --no-index --no-deps --no-compile \
            --no-cache-dir --disable-pip-version-check --root-user-action=ignore --upgrade --target "$site"
    else
        find "$whole" -name '*.whl' -print0 | xargs -0 -n 1 -I{} python3 -m zipfile -e {} "$site"
    fi
    nvidia-smi || true
    python3 -m trtpipe doctor
}

rtx() { python3 benchmarks/rtx_loads.py --results "$results"; }

tests() {
    [ -e data/digits/resnet.safetensors ] || python3 -m trtpipe.examples.digits make data/digits
    make test-gpu VENV="$environment" RESULTS="$results"
}

bench() { make bench-gpu VENV="$environment" RESULTS="$results" ARGS="--together ${ARGS:-}"; }

devices() { python3 benchmarks/devices.py --results "$results"; }

engines() { python3 benchmarks/engines.py --results "$results"; }

calibration() {
    python3 benchmarks/calibration.py --device cuda --no-memory --json >"$results/calibration-cuda.json"
    cat "$results/calibration-cuda.json"
}

if [ -n "${GPU_SESSION_STEP:-}" ]; then # this very script, started below for one step
    "$GPU_SESSION_STEP"
    exit
fi
again=(-s "$site")
for folder in "${wheels[@]}"; do again+=(-w "$folder"); done
failed=()
for step in "${steps[@]}"; do
    case $step in
        unpack | rtx | bench | calibration | devices | engines) run=$step ;;
        test) run=tests ;;
        *) echo "no step $step: unpack, rtx, test, bench, calibration, devices, engines" >&2; exit 2 ;;
    esac
    echo "== $step" | tee -a "$out/session.log"
    status=0
    GPU_SESSION_STEP=$run timeout -k 10 "$limit" "$0" "${again[@]}" 2>&1 | tee -a "$out/session.log" || status=$?
    [ "$status" -eq 0 ] || failed+=("$step (exit $status)")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
