"""What is particular to each peer's stored numbers: one literal table a file.

Keys that the harness added to a peer's own config, helpers that were called
alone, and where we depart from the peer on purpose.
"""

from parity.keys import (
    areal, nemo, openrlhf, prime_rl, rlax, roll, torchrl, verl)

PEERS = {"areal": areal.PEER, "nemo": nemo.PEER, "openrlhf": openrlhf.PEER,
         "prime_rl": prime_rl.PEER, "rlax": rlax.PEER, "roll": roll.PEER,
         "torchrl": torchrl.PEER, "verl": verl.PEER}
