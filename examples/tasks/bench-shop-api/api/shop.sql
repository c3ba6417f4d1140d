CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY,
    customer INTEGER NOT NULL REFERENCES customers (id),
    item TEXT NOT NULL,
    address TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('open', 'packed', 'sent'))
);
INSERT INTO customers VALUES
    (1, 'Ada Brandt'), (2, 'Mira Lindqvist'), (3, 'Mira Lindgren'), (4, 'Tomas Oyelaran');
INSERT INTO orders VALUES
    (101, 1, 'lantern', '3 Mill Lane, York', 'open'),
    (102, 2, 'kettle', '8 Quay Road, Hull', 'sent'),
    (103, 2, 'compass', '8 Quay Road, Hull', 'open'),
    (104, 3, 'candle', '8 Quay Road, Hull', 'open'),
    (105, 4, 'helmet', '1 North Bank, Perth', 'packed'),
    (106, 2, 'canvas', '8 Quay Road, Hull', 'packed'),
    (107, 2, 'marble', '21 Old Street, Leith', 'open'),
    (108, 1, 'anchor', '3 Mill Lane, York', 'sent');
