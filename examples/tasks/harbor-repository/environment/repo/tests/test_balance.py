from ledger.balance import balances, shown


def test_amounts_of_an_account_are_added():
    assert shown(balances(["rent -450.25", "food -12.50", "rent 50.25"])) == ["rent -400.00", "food -12.50"]


def test_comments_and_empty_lines_are_skipped():
    assert balances(["# March", ""]) == {}
