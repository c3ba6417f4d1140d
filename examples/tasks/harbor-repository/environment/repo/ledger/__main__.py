import sys

from ledger.balance import balances, shown

with open(sys.argv[1]) as file:
    print("\n".join(shown(balances(file))))
