import sys

with open(sys.argv[1]) as file:
    print(sum(int(line) for line in file))
