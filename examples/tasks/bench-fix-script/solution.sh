#!/bin/bash
cat > total.py <<'PYTHON'
import sys

with open(sys.argv[1]) as file:
    lines = [line.strip() for line in file]
print(f"{sum(float(line) for line in lines if line and not line.startswith('#')):.2f}")
PYTHON
