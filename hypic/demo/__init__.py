"""``make demo`` / ``hypic demo``: questions to documents through the real server, cold and warm, with the proof beside them.

* ``run``       the whole of it
* ``server``    `hypic serve` as a child process, stopped whatever happens
* ``client``    requests over HTTP, as any client would send them
* ``pages``     what the documents say, questions and prompts
* ``scenario``  what is asked, and what must come out
* ``checks``    P1 and P4 on the documents
* ``show``      the tables

The documents in ``documents/`` were written for this project and are under its licence (Apache-2.0).
"""


class DemoError(RuntimeError):
    """The demo cannot go on; the text says why."""
