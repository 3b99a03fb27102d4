// Division of what is known late by what is known early.
#pragma once

// Division by a number that is known before the dividend is: the first weights wait for the dividend.
class Divisor {
  public:
    __device__ __forceinline__ explicit Divisor(uint32_t divisor)
        : divisor_(divisor), inverse_(0xFFFFFFFF / divisor) {
        pin_register(inverse_);  // here, not where it is needed
    }
    __device__ __forceinline__ uint32_t quotient(uint32_t n) const {
        const uint32_t q = __umulhi(n, inverse_);  // less than n / divisor, by less than 2
        return n - q * divisor_ >= divisor_ ? q + 1 : q;
    }

  private:
    uint32_t divisor_, inverse_;
};
