"""Writes the logged values of many runs to one SQLite database.

    plugins:
      - sqlite-log: {file: runs.sqlite}

Tables: ``runs`` (id, folder) and ``scalars`` (run, step, name, value; NaN becomes NULL). A resumed run keeps its id.
"""

import sqlite3

from fastloop import Plugin, hookimpl, option

RUNS = "CREATE TABLE IF NOT EXISTS runs (id INTEGER PRIMARY KEY, folder TEXT)"
SCALARS = (
    "CREATE TABLE IF NOT EXISTS scalars (run INTEGER, step INTEGER, name TEXT, value REAL, PRIMARY KEY (run, step, "
    "name))"
)
WRITE = "INSERT OR REPLACE INTO scalars VALUES (?, ?, ?, ?)"


class SQLiteLog(Plugin):
    """Writes logged values to a SQLite database, with one table for runs and one for values."""

    name = "sqlite-log"
    read_only = True
    database: sqlite3.Connection | None = None  # on the main process, from before_fit to teardown
    id: int | None = None  # of the run, on the main process

    file: str = option("Path of the database, relative to the folder that holds the run folder.", default="runs.sqlite")

    @hookimpl
    def before_fit(self, run):
        if run.is_main:
            # seconds to wait for other runs
            self.database = sqlite3.connect(run.folder.parent / self.file, timeout=60)
            with self.database as database:  # a transaction
                database.execute(RUNS)
                database.execute(SCALARS)
                if self.id is None:
                    self.id = database.execute("INSERT INTO runs (folder) VALUES (?)", (str(run.folder),)).lastrowid
                # these steps are repeated
                database.execute("DELETE FROM scalars WHERE run = ? AND step > ?", (self.id, run.state.step))

    @hookimpl
    def log_scalars(self, scalars, step):
        with self.database as database:
            database.executemany(WRITE, [(self.id, step, name, value) for name, value in scalars.items()])

    @hookimpl
    def save_state(self):
        return {"id": self.id}

    @hookimpl
    def load_state(self, state):
        self.id = state["id"]

    @hookimpl
    def teardown(self):
        if self.database is not None:
            self.database.close()
