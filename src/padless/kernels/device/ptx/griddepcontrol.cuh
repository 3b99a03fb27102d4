// Order between kernels of a stream, where a launch may begin before the one before it has ended. One function is one
// instruction (PTX ISA, "griddepcontrol"). In a launch that waits as usual both do nothing.
#pragma once

// Returns when the kernels before this one have ended and what they wrote can be read.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may begin when every CTA has said so or ended. What it may read is its own wait's business.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
