"""The numbers of cuDNN's graph API; they are its binary interface, the same in every libcudnn.so.9."""

from enum import IntEnum


class Kind(IntEnum):
    """What a backend descriptor describes."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINE_CONFIGURATION = 3
    HEURISTICS = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    FORWARD = 10
    BACKWARD_FILTER = 11
    BACKWARD_DATA = 12
    OPERATION_GRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17
    DEVICE_PROPERTIES = 38


class AttributeType(IntEnum):
    """The type of an attribute's values; the C types stand in `descriptors`."""

    HANDLE = 0
    DATA_TYPE = 1
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    VOID_POINTER = 6
    CONVOLUTION_MODE = 7
    HEURISTICS_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    DESCRIPTOR = 15
    BEHAVIOUR_NOTE = 19
    INT32 = 23
    CHAR = 24


class Attribute(IntEnum):
    """An attribute of a backend descriptor; the first word is the descriptor's kind."""

    CONVOLUTION_COMPUTE_TYPE = 100
    CONVOLUTION_MODE = 101
    CONVOLUTION_DILATION = 102
    CONVOLUTION_STRIDE = 103
    CONVOLUTION_PADDING_AFTER = 104
    CONVOLUTION_PADDING_BEFORE = 105
    CONVOLUTION_SPATIAL_DIMENSIONS = 106
    HEURISTICS_MODE = 200
    HEURISTICS_GRAPH = 201
    HEURISTICS_RESULTS = 202
    HEURISTICS_DEVICE = 204
    CONFIGURATION_ENGINE = 300
    CONFIGURATION_KNOBS = 302
    CONFIGURATION_WORKSPACE = 303
    PLAN_HANDLE = 400
    PLAN_CONFIGURATION = 401
    PLAN_WORKSPACE = 402
    PLAN_DEVICE = 407
    KNOB_TYPE = 600
    KNOB_VALUE = 601
    FORWARD_ALPHA = 700
    FORWARD_BETA = 701
    FORWARD_CONVOLUTION = 702
    FORWARD_W = 703
    FORWARD_X = 704
    FORWARD_Y = 705
    BACKWARD_DATA_ALPHA = 706
    BACKWARD_DATA_BETA = 707
    BACKWARD_DATA_CONVOLUTION = 708
    BACKWARD_DATA_W = 709
    BACKWARD_DATA_DX = 710
    BACKWARD_DATA_DY = 711
    BACKWARD_FILTER_ALPHA = 712
    BACKWARD_FILTER_BETA = 713
    BACKWARD_FILTER_CONVOLUTION = 714
    BACKWARD_FILTER_DW = 715
    BACKWARD_FILTER_X = 716
    BACKWARD_FILTER_DY = 717
    GRAPH_HANDLE = 800
    GRAPH_OPERATIONS = 801
    GRAPH_ENGINES = 802
    TENSOR_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_ID = 906
    PACK_IDS = 1000
    PACK_POINTERS = 1001
    PACK_WORKSPACE = 1003
    ENGINE_GRAPH = 1300
    ENGINE_NUMBER = 1301
    ENGINE_NUMERICAL_NOTES = 1303
    ENGINE_BEHAVIOUR_NOTES = 1305
    ENGINE_DEVICE = 1307
    DEVICE_ID = 2700
    DEVICE_JSON = 2702


class DataType(IntEnum):
    """The element type of a tensor, or the type in which sums are held."""

    FLOAT = 0
    DOUBLE = 1
    HALF = 2
    BFLOAT16 = 9


class ConvolutionMode(IntEnum):
    """Whether the filter is flipped; PyTorch's convolution does not flip it."""

    CROSS_CORRELATION = 1


class HeuristicMode(IntEnum):
    """How cuDNN makes its list of configurations."""

    FALLBACK = 2
    """Configurations that are likely to run where no other does."""
    A = 3
    """By predicted time, the fastest first."""


class NumericalNote(IntEnum):
    """What an engine does to the numbers."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4X4 = 6
    WINOGRAD_TILE_6X6 = 7
    WINOGRAD_TILE_13X13 = 8
    STRICT_NAN_PROP = 9


class BehaviourNote(IntEnum):
    """What an engine needs or permits, the numbers aside."""

    RUNTIME_COMPILATION = 0
    FILTER_INT8_REORDER = 1
    BIAS_INT8_REORDER = 2
    SUPPORTS_CUDA_GRAPH_NATIVE_API = 3
    CUBLASLT_DEPENDENCY = 4


class Status(IntEnum):
    """The statuses that this package tells apart; the thousands are the class."""

    NOT_INITIALIZED = 1001
    SUBLIBRARY_VERSION_MISMATCH = 1002
    SUBLIBRARY_LOADING_FAILED = 1008
    BAD_PARAM = 2000
    """The least status of a call that is mistaken; what lies below is a broken set-up."""
    NOT_SUPPORTED = 3000
    """The least status that means "not here"."""
    HOST_ALLOCATION_FAILED = 4003
    DEVICE_ALLOCATION_FAILED = 4004
    EXECUTION_FAILED = 5000
    """The least status of a failure while the device works."""


MOST_KNOBS = 44
"""The number of knob types; no configuration has more choices."""
