#!/bin/bash
python3 - <<'END'
import json
import urllib.request

API = "http://api:8000"


def ask(path, method="GET", body=None):
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(API + path, data, method=method)) as reply:
        return json.load(reply)


[customer] = [one["id"] for one in ask("/customers") if one["name"] == "Mira Lindqvist"]
for order in ask(f"/orders?customer={customer}"):
    if order["state"] != "sent":
        ask(f"/orders/{order['id']}", "PATCH", {"address": "12 Harbour Street, Leith"})
END
