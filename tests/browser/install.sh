#!/bin/sh
# What the tests of pages need beside Python: Chromium from Debian, axe-core from npm. Without them they are skipped.
set -eu
cd "$(dirname "$0")"

skip() {
  echo "browser: $1; its tests will be skipped"
  exit 0
}

missing=
command -v chromium >/dev/null || missing="chromium"
command -v npm >/dev/null || missing="$missing npm"
if [ -n "$missing" ]; then
  [ "$(id -u)" = 0 ] || skip "not root, and there is no $missing"
  command -v apt-get >/dev/null || skip "there is no apt-get, and no $missing"
  export DEBIAN_FRONTEND=noninteractive
  timeout 120 apt-get update --quiet --quiet || skip "apt-get update failed"
  timeout 400 apt-get install --yes --quiet --quiet --no-install-recommends $missing || skip "$missing cannot be installed"
fi
[ -e node_modules/axe-core/axe.min.js ] ||
  timeout 120 npm ci --silent --no-audit --no-fund --ignore-scripts || skip "axe-core cannot be had"
