#!/usr/bin/env bash
# Unpack Intel's offline GPU compiler (ocloc) and a driver that can simulate a GPU into a folder.
#
# Nothing is installed: Debian sid's packages (80 MB, 400 MB unpacked) with the C library they need.
# Afterwards FOLDER/ocloc is the compiler.
#
#     [DEBIAN_MIRROR=http://...] benchmarks/common/ocloc.sh FOLDER && PATH=$PATH:FOLDER ocloc ids pvc
set -euo pipefail
mkdir -p "${1:?a folder to put them into}"
root=$(realpath "$1")
packages=(intel-ocloc libigc2 libze-intel-gpu1 libze1)
mkdir -p "$root"/{state/lists/partial,cache/archives/partial,files}
touch "$root/status"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
# From where this Debian has its own packages, or another place that is named.
mirror=${DEBIAN_MIRROR:-$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null || :; } \
  | grep -oEm1 '^[^#]*https?://[^ ]+/debian\b' | grep -oE 'https?://.*')}
echo "deb [signed-by=$keys] ${mirror:?name one in DEBIAN_MIRROR} sid main" > "$root/sources.list"
apt=(apt-get -qq -o Dir::State="$root/state" -o Dir::State::status="$root/status"
  -o Dir::Cache="$root/cache" -o Dir::Etc::sourcelist="$root/sources.list"
  -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::parts=/dev/null -o APT::Sandbox::User=root
  -o Debug::NoLocking=1)
"${apt[@]}" update
"${apt[@]}" install --yes --download-only --no-install-recommends "${packages[@]}"
for package in "$root"/cache/archives/*.deb; do dpkg-deb --extract "$package" "$root/files"; done
libraries=$root/files/usr/lib/x86_64-linux-gnu
cat > "$root/ocloc" <<END
#!/bin/sh
exec "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$(ls "$root"/files/usr/bin/ocloc*)" "\$@"
END
chmod +x "$root/ocloc"
