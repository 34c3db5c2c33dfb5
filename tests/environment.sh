#!/bin/sh
# Make .venvs/torch-VERSION (a number, or newest) or .venvs/hydra-VERSION (HYDRA:OMEGACONF): all of constraints.txt, but for that.
set -eu
cd "$(dirname "$0")/.."
package=$1 version=$2
folder=.venvs/$package-${version%:*}
[ -e "$folder/.ready" ] && exit 0
echo "installing into $folder (once; a torch with CUDA takes minutes and 8 GB)"
"${PYTHON:-python3}" -m venv "$folder"
others=$(mktemp)
trap 'rm -f "$others"' EXIT
case $package in
    torch) grep -v '^torch==' constraints.txt > "$others"
           wanted="torch==$version"; [ "$version" = newest ] && wanted=torch ;;
    hydra) grep -vE '^(hydra-core|omegaconf)==' constraints.txt > "$others"
           wanted="hydra-core==${version%:*} omegaconf==${version#*:}" ;;
esac
pip="$folder/bin/python -m pip install --quiet --disable-pip-version-check"
$pip --no-deps -r "$others"
# shellcheck disable=SC2086
$pip $wanted
$pip --no-deps --editable .
touch "$folder/.ready"
