#!/bin/bash
cd /app/notes
for file in *; do
    echo "$file,$(wc -w < "$file")"
done | sort > /app/counts.csv
