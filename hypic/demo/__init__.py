"""``make demo`` / ``hypic demo``: a RAG prompt through the real server, cold and warm, with the proof beside the times.

* ``run``       the whole of it
* ``server``    `hypic serve` as a child process, stopped whatever happens
* ``client``    requests over HTTP, as any client would send them
* ``scenario``  what is asked, what must come out, P1 and P4 on the documents
* ``show``      the table

The documents in ``documents/`` were written for this project and are under its licence (Apache-2.0).
"""


class DemoError(RuntimeError):
    """The demo cannot go on; the text says why."""
