#!/usr/bin/env bash
# Writes deploy/.env with fresh secrets, readable by its owner only; keeps the ones that are there. Compose reads it.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
touch .env
for name in TEMPORAL_DB_PASSWORD LINEAGE_DB_PASSWORD S3_ACCESS_KEY S3_SECRET_KEY GRAFANA_PASSWORD; do
  # Hexadecimal: they become part of URLs.
  grep -q "^$name=" .env || echo "$name=$(od -An -N20 -tx1 /dev/urandom | tr -d ' \n')" >>.env
done
