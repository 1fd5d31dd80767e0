"""``hypic launch``: the processes of a cluster on one node, and who looks after them. Needs no SGLang itself."""
