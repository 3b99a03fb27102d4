// Who does what. A launch has as many shares of work as CTAs. A CTA draws its first share when it starts, so that shares are
// equal, and nothing has to be drawn later, where all CTAs run. Hidden rows are read by every CTA, so before a CTA begins
// with the second product every share must have been taken by a CTA that runs: where some are not (another kernel holds
// their multiprocessors), the CTAs that wait take those shares too. A CTA does the first product of all its shares before
// the second one of any: whoever waits for hidden rows waits for CTAs that run and wait for nobody. One is enough.
#pragma once

constexpr int PATIENCE = 16;  // looks at the counter, before a CTA takes a second share

// One thread. Ends when this CTA needs no more of the control words.
__device__ __forceinline__ void take_shares(SharedStorage& shared, const Problem& p) {
    Control& control = *p.control;
    const uint32_t shares = gridDim.x;
    const uint32_t first = atom_add_relaxed_gpu(&control.shares, 1);
    shared.launches = ld_relaxed_gpu(&control.launches);
    shared.old_words = ld_relaxed_gpu(&control.words);
    int held = 0;
    if (first < shares)
        announce_share(shared, held++, first);
    else
        announce_share(shared, held++, NO_SHARE);
    mbarrier_arrive(shared_address(&shared.routed));

    if (first < shares) {
        for (int looks = 0; ld_relaxed_gpu(&control.shares) < shares; ++looks) {
            if (looks < PATIENCE) {
                __nanosleep(100);
                continue;
            }
            const uint32_t another = atom_add_relaxed_gpu(&control.shares, 1);
            if (another < shares) announce_share(shared, held++, another);
        }
        announce_share(shared, held, NO_SHARE);
    }
    mbarrier_wait(shared_address(&shared.routed), 0);  // the number of rows is known
    fence_acq_rel_gpu();  // what this CTA read and drew comes before its being counted
    if (atom_add_relaxed_gpu(&control.finished, 1) == shares - 1) {
        fence_acq_rel_gpu();
        const uint32_t launches = shared.launches;
        st_relaxed_gpu(&control.shares, 0);
        st_relaxed_gpu(&control.finished, 0);
        st_relaxed_gpu(&control.words, shared.first_row[shared.num_hit] * p.words_of_row());
        st_relaxed_gpu(&control.launches, launches + 1);
    }
}

// Warp: clears the part of each of this CTA's shares of the buffer that the launch before wrote. This launch does not
// look at it, the next one will.
__device__ __forceinline__ void clear_old_rows(SharedStorage& shared, const Problem& p, int lane) {
    uint32_t* old = p.hidden(shared.launches + 1);
    const int quads = shared.old_words / 4;
    for (int n = 0;; ++n) {
        const int share = share_at(shared, n, lane);
        if (share < 0) return;
        const Range range = range_of(quads, share, gridDim.x);
        for (int quad = range.begin + lane; quad < range.end; quad += 32)
            reinterpret_cast<uint4*>(old)[quad] = make_uint4(0, 0, 0, 0);
    }
}
