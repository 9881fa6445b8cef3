"""All methods once more, written from their specification and not from the product.

Plain loops over rounds, clients, epochs, batches and named tensors, in float64. They share nothing
but what the specification states once for all methods (`spec.py`). Each takes `mutant`, the name of
a deliberate error: the tests show that the product differs from every one of them.
"""

from transcriptions.apfl import apfl
from transcriptions.deprl import deprl
from transcriptions.dfedavgm import dfedavgm
from transcriptions.dfedavgmp import dfedavgmp
from transcriptions.dfedpgp import dfedpgp
from transcriptions.dfedpgpsam import dfedpgpsam
from transcriptions.dfedsalt import dfedsalt
from transcriptions.dfedsam import dfedsam
from transcriptions.dfedsgpsm import dfedsgpsm
from transcriptions.dispfl import dispfl
from transcriptions.ditto import ditto
from transcriptions.fedala import fedala
from transcriptions.fedamp import fedamp
from transcriptions.fedas import fedas
from transcriptions.fedavg import fedavg
from transcriptions.fedbabu import fedbabu
from transcriptions.feddbe import feddbe
from transcriptions.fedper import fedper
from transcriptions.fedproto import fedproto
from transcriptions.fedprox import fedprox
from transcriptions.fedrep import fedrep
from transcriptions.fedrod import fedrod
from transcriptions.kgt import kgt
from transcriptions.lgfedavg import lgfedavg
from transcriptions.local import local
from transcriptions.moon import moon
from transcriptions.osgp import osgp
from transcriptions.perfedavg import perfedavg
from transcriptions.pfedme import pfedme
from transcriptions.pushdiging import pushdiging
from transcriptions.scaffold import scaffold
from transcriptions.scaffoldp import scaffoldp

__all__ = [
    "apfl",
    "deprl",
    "dfedavgm",
    "dfedavgmp",
    "dfedpgp",
    "dfedpgpsam",
    "dfedsalt",
    "dfedsam",
    "dfedsgpsm",
    "dispfl",
    "ditto",
    "fedala",
    "fedamp",
    "fedas",
    "fedavg",
    "fedbabu",
    "feddbe",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrep",
    "fedrod",
    "kgt",
    "lgfedavg",
    "local",
    "moon",
    "osgp",
    "perfedavg",
    "pfedme",
    "pushdiging",
    "scaffold",
    "scaffoldp",
]
