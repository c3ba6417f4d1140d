import json
import urllib.request

NEW = "12 Harbour Street, Leith"
BEFORE = {
    101: "3 Mill Lane, York",
    102: "8 Quay Road, Hull",
    103: "8 Quay Road, Hull",
    104: "8 Quay Road, Hull",
    105: "1 North Bank, Perth",
    106: "8 Quay Road, Hull",
    107: "21 Old Street, Leith",
    108: "3 Mill Lane, York",
}
HERS = {103, 106, 107}


def addresses():
    with urllib.request.urlopen("http://api:8000/orders", timeout=10) as reply:
        return {order["id"]: order["address"] for order in json.load(reply)}


def test_her_orders_that_are_not_sent_go_to_the_new_address():
    found = addresses()
    assert {number: found[number] for number in HERS} == dict.fromkeys(HERS, NEW)


def test_all_others_are_as_they_were():
    found = addresses()
    assert {number: found[number] for number in BEFORE.keys() - HERS} == {
        number: address for number, address in BEFORE.items() if number not in HERS
    }
