#!/bin/sh
# The systems that the integration tests run, from Debian's packages. Without root or apt, their tests are skipped.
set -eu

packages="s3fs fuse3 ceph-mon ceph-mgr ceph-osd radosgw
  swift swift-proxy swift-account swift-container swift-object memcached softhsm2"

missing=
for package in $packages; do
  dpkg-query --show --showformat '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' ||
    missing="$missing $package"
done
[ -n "$missing" ] || exit 0

skip() {
  echo "integration: $1; tests of$missing will be skipped"
  exit 0
}
[ "$(id -u)" = 0 ] || skip "not root"
command -v apt-get >/dev/null || skip "there is no apt-get"

# What comes as a service is not to be started.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  printf '#!/bin/sh\nexit 101\n' >$policy
  chmod 755 $policy
  trap 'rm -f $policy' EXIT
fi

export DEBIAN_FRONTEND=noninteractive
install="apt-get install --yes --quiet --quiet --no-install-recommends"
# Bounded in time: the network's part is, and what is left is never cut off in the middle.
timeout 120 apt-get update --quiet --quiet || skip "apt-get update failed"
timeout 300 $install --download-only $missing || skip "packages cannot be had"
$install --no-download $missing || skip "packages cannot be installed"
