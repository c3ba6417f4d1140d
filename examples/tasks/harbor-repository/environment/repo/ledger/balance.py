"""Balances of accounts from lines such as `rent -450.25`."""

from decimal import Decimal


def balances(lines):
    """Account to balance, in the order in which accounts first appear."""
    found = {}
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        account, amount = line.split()
        found[account] = found.get(account, Decimal(0)) + Decimal(amount)
    return found


def shown(found):
    """One line per account, two decimals."""
    return [f"{account} {amount:.2f}" for account, amount in found.items()]
