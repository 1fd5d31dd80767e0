"""``hypic doctor``: does hypic fit this machine, this SGLang and this model? Starts no server and loads no weights.

* ``findings``      what was found, and which of it keeps hypic from working
* ``installation``  versions, platform, hook tables
* ``model``         support, artifact sizes and memory plan, from the model's config alone
* ``show``          the same for people
"""
