"""What is particular to each peer's stored numbers: one literal table a file.

Keys that the harness added to a peer's own config, helpers that were called
alone, and where we depart from the peer on purpose.
"""

from parity.keys import (
    areal, nemo, openrlhf, prime_rl, rlax, roll, skyrl, slime, torchrl, trl, tunix,
    verl)

PEERS = {"areal": areal.PEER, "nemo": nemo.PEER, "openrlhf": openrlhf.PEER,
         "prime_rl": prime_rl.PEER, "rlax": rlax.PEER, "roll": roll.PEER,
         "skyrl": skyrl.PEER, "slime": slime.PEER, "torchrl": torchrl.PEER,
         "trl": trl.PEER, "tunix": tunix.PEER, "verl": verl.PEER}
