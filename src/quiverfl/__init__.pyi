"""The public names, and where they come from. `__init__.py` reads this file when one is used."""

from quiverfl.clock.devices import (
    Devices as Devices,
)
from quiverfl.clock.settings import (
    Timing as Timing,
)
from quiverfl.data.batches import (
    batch_order as batch_order,
)
from quiverfl.data.dataset import (
    Dataset as Dataset,
)
from quiverfl.data.federated import (
    FederatedData as FederatedData,
)
from quiverfl.data.federated import (
    partition as partition,
)
from quiverfl.data.sources import (
    load_dataset as load_dataset,
)
from quiverfl.data.sources.libraries import (
    from_huggingface as from_huggingface,
)
from quiverfl.data.sources.libraries import (
    from_torch as from_torch,
)
from quiverfl.data.sources.table import (
    from_pandas as from_pandas,
)
from quiverfl.engine.settings import (
    RunSettings as RunSettings,
)
from quiverfl.errors import (
    CallbackFailed as CallbackFailed,
)
from quiverfl.errors import (
    Diverged as Diverged,
)
from quiverfl.errors import (
    Interrupted as Interrupted,
)
from quiverfl.errors import (
    QuiverError as QuiverError,
)
from quiverfl.laws.check import (
    LawVerdict as LawVerdict,
)
from quiverfl.laws.check import (
    MethodCheck as MethodCheck,
)
from quiverfl.laws.check import (
    check_method as check_method,
)
from quiverfl.methods import (
    APFL as APFL,
)
from quiverfl.methods import (
    KGT as KGT,
)
from quiverfl.methods import (
    METHODS as METHODS,
)
from quiverfl.methods import (
    MOON as MOON,
)
from quiverfl.methods import (
    OSGP as OSGP,
)
from quiverfl.methods import (
    SCAFFOLD as SCAFFOLD,
)
from quiverfl.methods import (
    DePRL as DePRL,
)
from quiverfl.methods import (
    DFedAvgM as DFedAvgM,
)
from quiverfl.methods import (
    DFedAvgMP as DFedAvgMP,
)
from quiverfl.methods import (
    DFedPGP as DFedPGP,
)
from quiverfl.methods import (
    DFedPGPSAM as DFedPGPSAM,
)
from quiverfl.methods import (
    DFedSalt as DFedSalt,
)
from quiverfl.methods import (
    DFedSAM as DFedSAM,
)
from quiverfl.methods import (
    DFedSGPSM as DFedSGPSM,
)
from quiverfl.methods import (
    DisPFL as DisPFL,
)
from quiverfl.methods import (
    Ditto as Ditto,
)
from quiverfl.methods import (
    FedALA as FedALA,
)
from quiverfl.methods import (
    FedAS as FedAS,
)
from quiverfl.methods import (
    FedAvg as FedAvg,
)
from quiverfl.methods import (
    FedBABU as FedBABU,
)
from quiverfl.methods import (
    FedBN as FedBN,
)
from quiverfl.methods import (
    FedDBE as FedDBE,
)
from quiverfl.methods import (
    FedPer as FedPer,
)
from quiverfl.methods import (
    FedProto as FedProto,
)
from quiverfl.methods import (
    FedProx as FedProx,
)
from quiverfl.methods import (
    FedRep as FedRep,
)
from quiverfl.methods import (
    FedRoD as FedRoD,
)
from quiverfl.methods import (
    Interleaved as Interleaved,
)
from quiverfl.methods import (
    Local as Local,
)
from quiverfl.methods import (
    Lookahead as Lookahead,
)
from quiverfl.methods import (
    Loss as Loss,
)
from quiverfl.methods import (
    Message as Message,
)
from quiverfl.methods import (
    Method as Method,
)
from quiverfl.methods import (
    PerFedAvg as PerFedAvg,
)
from quiverfl.methods import (
    PFedMe as PFedMe,
)
from quiverfl.methods import (
    PushDIGing as PushDIGing,
)
from quiverfl.methods import (
    ScaffoldP as ScaffoldP,
)
from quiverfl.methods import (
    SingleStep as SingleStep,
)
from quiverfl.methods import (
    Start as Start,
)
from quiverfl.methods import (
    StepInfo as StepInfo,
)
from quiverfl.methods import (
    Train as Train,
)
from quiverfl.methods import (
    Trained as Trained,
)
from quiverfl.methods.state import (
    Personal as Personal,
)
from quiverfl.methods.state import (
    Replicated as Replicated,
)
from quiverfl.methods.state import (
    Scalar as Scalar,
)
from quiverfl.methods.state import (
    Shared as Shared,
)
from quiverfl.models import (
    MODELS as MODELS,
)
from quiverfl.models import (
    compiled as compiled,
)
from quiverfl.models import (
    make_model as make_model,
)
from quiverfl.models.lora import (
    lora as lora,
)
from quiverfl.models.resnet import (
    group_norm as group_norm,
)
from quiverfl.objectives import (
    Metric as Metric,
)
from quiverfl.options import (
    Count as Count,
)
from quiverfl.options import (
    Fraction as Fraction,
)
from quiverfl.options import (
    NotNegative as NotNegative,
)
from quiverfl.options import (
    Number as Number,
)
from quiverfl.options import (
    Positive as Positive,
)
from quiverfl.options import (
    UnitInterval as UnitInterval,
)
from quiverfl.peer.api import (
    Peer as Peer,
)
from quiverfl.runs.callbacks import (
    Callback as Callback,
)
from quiverfl.runs.callbacks import (
    EarlyStopping as EarlyStopping,
)
from quiverfl.runs.callbacks import (
    MLflow as MLflow,
)
from quiverfl.runs.callbacks import (
    TensorBoard as TensorBoard,
)
from quiverfl.runs.callbacks import (
    WandB as WandB,
)
from quiverfl.runs.compare import (
    Comparison as Comparison,
)
from quiverfl.runs.compare import (
    compare as compare,
)
from quiverfl.runs.compare import (
    report as report,
)
from quiverfl.runs.experiment import (
    Experiment as Experiment,
)
from quiverfl.runs.retime import (
    retime as retime,
)
from quiverfl.runs.run import (
    ClientState as ClientState,
)
from quiverfl.runs.run import (
    Run as Run,
)
from quiverfl.runs.run import (
    SavedRun as SavedRun,
)
from quiverfl.runs.run import (
    load_run as load_run,
)
from quiverfl.runs.simulate import (
    simulate as simulate,
)
from quiverfl.support.environment import (
    keep_freed_memory as keep_freed_memory,
)
from quiverfl.sweeps.api import (
    SweepResult as SweepResult,
)
from quiverfl.sweeps.api import (
    sweep as sweep,
)
from quiverfl.task import (
    ModelOutputs as ModelOutputs,
)
from quiverfl.task import (
    Params as Params,
)
from quiverfl.task import (
    Task as Task,
)
from quiverfl.topologies import (
    TOPOLOGIES as TOPOLOGIES,
)
from quiverfl.topologies import (
    Graph as Graph,
)
from quiverfl.topologies import (
    Membership as Membership,
)
from quiverfl.topologies import (
    ReportSpec as ReportSpec,
)
from quiverfl.topologies import (
    ReportView as ReportView,
)
from quiverfl.topologies import (
    Topology as Topology,
)
from quiverfl.topologies import (
    balanced_push as balanced_push,
)
from quiverfl.topologies import (
    bandit_push as bandit_push,
)
from quiverfl.topologies import (
    base_graph as base_graph,
)
from quiverfl.topologies import (
    custom as custom,
)
from quiverfl.topologies import (
    directed_ring as directed_ring,
)
from quiverfl.topologies import (
    epidemic as epidemic,
)
from quiverfl.topologies import (
    erdos_renyi as erdos_renyi,
)
from quiverfl.topologies import (
    exponential as exponential,
)
from quiverfl.topologies import (
    from_matrix as from_matrix,
)
from quiverfl.topologies import (
    from_networkx as from_networkx,
)
from quiverfl.topologies import (
    full as full,
)
from quiverfl.topologies import (
    grid as grid,
)
from quiverfl.topologies import (
    isolated as isolated,
)
from quiverfl.topologies import (
    loss_push as loss_push,
)
from quiverfl.topologies import (
    one_peer_exponential as one_peer_exponential,
)
from quiverfl.topologies import (
    participating as participating,
)
from quiverfl.topologies import (
    random_pull as random_pull,
)
from quiverfl.topologies import (
    random_push as random_push,
)
from quiverfl.topologies import (
    random_regular as random_regular,
)
from quiverfl.topologies import (
    ring as ring,
)
from quiverfl.topologies import (
    similar_pull as similar_pull,
)
from quiverfl.topologies import (
    similar_push as similar_push,
)
from quiverfl.topologies import (
    star as star,
)
from quiverfl.topologies import (
    torus as torus,
)
from quiverfl.topologies import (
    unreliable as unreliable,
)
from quiverfl.topologies import (
    with_members as with_members,
)
from quiverfl.training import (
    Training as Training,
)
from quiverfl.transforms.attacks import (
    Adaptive as Adaptive,
)
from quiverfl.transforms.attacks import (
    AddNoise as AddNoise,
)
from quiverfl.transforms.attacks import (
    ForgedMass as ForgedMass,
)
from quiverfl.transforms.attacks import (
    LabelFlip as LabelFlip,
)
from quiverfl.transforms.attacks import (
    ScaledUpdate as ScaledUpdate,
)
from quiverfl.transforms.attacks import (
    SignFlip as SignFlip,
)
from quiverfl.transforms.compression import (
    Quantize as Quantize,
)
from quiverfl.transforms.compression import (
    RandomK as RandomK,
)
from quiverfl.transforms.compression import (
    TopK as TopK,
)
from quiverfl.transforms.privacy import (
    DPSGD as DPSGD,
)
from quiverfl.transforms.privacy import (
    UpdatePrivacy as UpdatePrivacy,
)
from quiverfl.transforms.robustness import (
    Balance as Balance,
)
from quiverfl.transforms.robustness import (
    NormBound as NormBound,
)
from quiverfl.transforms.robustness import (
    SelfCenteredClip as SelfCenteredClip,
)

__version__: str
