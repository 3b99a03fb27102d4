// What FlashInfer's moe_tma.cu needs of TVM-FFI: a condition that says something where it does not hold.
#pragma once
#include <iostream>
#define TVM_FFI_ICHECK(condition) \
    if (condition) {              \
    } else                        \
        std::cerr
