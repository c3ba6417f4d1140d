#!/bin/sh
# Temporal's two databases and their schemas, brought to the server's version. Run before every start of the server.
set -eu
tool() {
  temporal-sql-tool --plugin postgres12 --ep "$POSTGRES_SEEDS" -p 5432 -u "$POSTGRES_USER" --db "$1" "$2" $3
}
for database in temporal temporal_visibility; do
  schema=$([ "$database" = temporal ] && echo temporal || echo visibility)
  # Both are refused where they are there already; the update then brings them up to date, or says what is wrong.
  tool "$database" create "" || true
  tool "$database" setup-schema "-v 0.0" || true
  tool "$database" update-schema "-d /etc/temporal/schema/postgresql/v12/$schema/versioned"
done
