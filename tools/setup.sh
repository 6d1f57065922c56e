#!/usr/bin/env bash
# Installs what the Makefile's targets need: packages of Debian, and a virtual environment in .local/venv.
# `tools/setup.sh` is enough for the demo, `tools/setup.sh dev` adds what tests and lint want.
# Fast when nothing is missing. PG_MAJOR chooses another major version of PostgreSQL.
set -euo pipefail
cd "$(dirname "$0")/.."

major=${PG_MAJOR:-15}
packages=("postgresql-$major" "postgresql-$major-cron" "postgresql-plpython3-$major" python3-zstandard python3-cryptography
    python3-venv)
if [ "${1:-}" = dev ]; then
    packages+=("postgresql-$major-plpgsql-check" shellcheck)
fi

fail() {
    echo "error: $1" >&2
    exit 1
}

installed() {
    [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# The lock of the package lists, unlike dpkg's, is not waited for by apt-get itself.
update_lists() {
    local try
    for try in $(seq 60); do
        if apt-get update -qq; then
            return
        fi
        echo "apt-get update failed (try $try); again in 5 seconds" >&2
        sleep 5
    done
    fail "apt-get update failed"
}

install_packages() {
    export DEBIAN_FRONTEND=noninteractive
    local apt=(apt-get -qq -y -o DPkg::Lock::Timeout=600 install --no-install-recommends)
    local no_cluster=/etc/postgresql-common/createcluster.d/pg_queen.conf
    update_lists
    # Debian's server package makes and starts a cluster of its own the first time. Nobody asked for one here: the
    # demo and the tests have their own. A machine that had PostgreSQL before keeps its ways.
    if ! installed postgresql-common; then
        "${apt[@]}" postgresql-common
        mkdir -p "${no_cluster%/*}"
        # shellcheck disable=SC2064
        trap "rm -f '$no_cluster'" EXIT
        echo 'create_main_cluster = false' >"$no_cluster"
    fi
    "${apt[@]}" "$@"
}

mkdir -p .local
# Two makes in one checkout take turns.
exec 9>.local/setup.lock
flock 9

if command -v dpkg-query >/dev/null; then
    missing=()
    for package in "${packages[@]}"; do
        installed "$package" || missing+=("$package")
    done
    if [ ${#missing[@]} -gt 0 ]; then
        if [ "$(id -u)" -ne 0 ]; then
            fail "packages are missing, and only root can install them. Run this, then try again:
    sudo apt-get update && sudo apt-get install -y ${missing[*]}"
        fi
        echo "Installing ${missing[*]}"
        install_packages "${missing[@]}"
    fi
else
    echo "This is no Debian: PostgreSQL $major with pg_cron and plpython3u, and zstandard for the Python that PL/Python" >&2
    echo "uses, must be installed already." >&2
fi

# The system's Python where it can make a virtual environment: others come and go under a person's home.
python=/usr/bin/python3
"$python" -c 'import ensurepip, venv' 2>/dev/null || python=python3
venv=.local/venv
# The scripts in a virtual environment name its path, so a checkout that was moved needs a new one.
stamp=$({ pwd; "$python" --version; cat python/pyproject.toml; } | sha256sum)
if [ "$(cat "$venv/stamp" 2>/dev/null)" != "$stamp" ]; then
    echo "Making the virtual environment $venv"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --editable 'python[dev]'
    echo "$stamp" >"$venv/stamp"
fi
