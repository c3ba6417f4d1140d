"""The shop's API: JSON over HTTP in front of a SQLite database."""

import json
import os
import sqlite3
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

DATABASE = os.environ["DATABASE"]
HELP = {
    "GET /customers": "all customers",
    "GET /orders?customer=ID": "a customer's orders, or all without a customer",
    "GET /orders/ID": "one order",
    "PATCH /orders/ID": 'change an order: the body is {"address": "..."}',
}


def rows(query, *values):
    connection = sqlite3.connect(DATABASE, timeout=5)
    try:
        connection.row_factory = sqlite3.Row
        with connection:
            return [dict(row) for row in connection.execute(query, values)]
    finally:
        connection.close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        url = urlsplit(self.path)
        if url.path == "/":
            return self.answer(200, HELP)
        if url.path == "/customers":
            return self.answer(200, rows("SELECT * FROM customers ORDER BY id"))
        if url.path == "/orders":
            customer = parse_qs(url.query).get("customer")
            if customer is None:
                return self.answer(200, rows("SELECT * FROM orders ORDER BY id"))
            return self.answer(200, rows("SELECT * FROM orders WHERE customer = ? ORDER BY id", customer[0]))
        self.one()

    def do_PATCH(self):
        try:
            change = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            address = change["address"]
        except (ValueError, KeyError, TypeError):
            return self.answer(400, {"error": HELP["PATCH /orders/ID"]})
        if not isinstance(address, str) or not address.strip():
            return self.answer(400, {"error": "address is text"})
        if self.order():
            rows("UPDATE orders SET address = ? WHERE id = ?", address, self.order()[0]["id"])
        self.one()

    def order(self):
        place, _, number = urlsplit(self.path).path.rpartition("/")
        return rows("SELECT * FROM orders WHERE id = ?", number) if place == "/orders" else []

    def one(self):
        found = self.order()
        self.answer(200, found[0]) if found else self.answer(404, {"error": "not found", "try": HELP})

    def answer(self, status, content):
        body = json.dumps(content).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("", 8000), Handler).serve_forever()
