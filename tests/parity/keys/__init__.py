"""What is particular to each peer's stored numbers: one literal table a file.

Keys that the harness added to a peer's own config, helpers that were called
alone, and where we depart from the peer on purpose.
"""

from parity.keys import nemo, openrlhf

PEERS = {"nemo": nemo.PEER, "openrlhf": openrlhf.PEER}
