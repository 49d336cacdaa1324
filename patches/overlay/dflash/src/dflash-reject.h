// Lossless verification of sampled drafts (speculative sampling: Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318).
//
// The draft token x was drawn from q. With p the target's distribution after the request's whole sampler chain, x is
// accepted with probability min(1, p(x)/q(x)); otherwise the token is drawn from the normalised positive part of p - q.
// The emitted token then has distribution p whatever q is, as long as q is exactly what x was drawn from.
//
// p exists only if the chain ends by drawing from the probabilities it has computed and nothing in it draws or adapts
// before: dflash_chain_has_distribution() tells. Everything else keeps the match rule.

#pragma once

#include "llama.h"

#include <cstdint>
#include <random>
#include <vector>

// distribution over the candidates of one drafted position
struct dflash_q_row {
    std::vector<llama_token> ids;
    std::vector<double>      q;     // shaped as the request shapes its target, sums to 1
    llama_token              drawn = LLAMA_TOKEN_NULL;
    bool                     greedy = false; // `drawn` is the most likely candidate by rule: the true q is one-hot
};

// uniform numbers of the draft and of acceptance, apart from the chain's own stream
class dflash_rng {
public:
    void   seed(uint64_t seed) { rng.seed(seed); }
    double uniform() { return (double) (rng() >> 11) * 0x1.0p-53; } // [0, 1)

private:
    std::mt19937_64 rng;
};

// running comparison of the two ways to draft under rejection, both lossless
class dflash_overlap {
public:
    // one visited position: sum of min(p, q) for a sampled draft, p of the likeliest candidate for a greedy one, p of all
    // candidates together
    void add(double sum_min, double p_top, double p_all);

    // a new text begins: the choice must not depend on earlier ones, or a seed would not give the same text again
    void restart() {
        sampled = HEAD_START;
        top     = 0.0;
        weight  = 0.0;
    }

    bool prefer_greedy() const { return weight > 4.0 && top > sampled; }

    // sums over all visited positions
    double  total_sampled = 0.0;
    double  total_greedy  = 0.0;
    double  total_reach   = 0.0;
    int64_t n_total       = 0;

private:
    // accepted tokens that drafts drawn from q are ahead by at first: after few positions the comparison is mostly chance, and
    // they are the better ones on most texts
    static constexpr double HEAD_START = 2.0;

    double sampled = HEAD_START;
    double top     = 0.0;
    double weight  = 0.0;
};

// true if the chain's result is a draw from a distribution that it leaves in the candidates' p
bool dflash_chain_has_distribution(const llama_sampler * chain);

// apply everything of the chain except the final draw
void dflash_chain_shape(llama_sampler * chain, llama_token_data_array * cur);

// Shape the candidates' scores by the chain, draw (or take the best) and note the distribution in `row`.
// Returns the index into the candidates, -1 if the chain left none.
int32_t dflash_draw(llama_sampler * chain, const llama_token * ids, const float * scores, int32_t n, bool greedy,
        dflash_rng & rng, dflash_q_row & row);

// `p`: candidates after the whole chain, with probabilities. Sets p.selected by the rule above; true if the draft token was
// accepted.
bool dflash_couple(llama_token_data_array & p, const dflash_q_row & row, dflash_rng & rng, dflash_overlap * overlap);

// The same through llama-common's sampler, which keeps its candidates to itself: while an object of this class lives, the
// first dflash_apply_coupling on its thread couples with `row` (null: does nothing). Ends with its scope, exceptions included.
class dflash_coupling {
public:
    dflash_coupling(const dflash_q_row * row, dflash_rng & rng, dflash_overlap * overlap);
    ~dflash_coupling();

    dflash_coupling(const dflash_coupling &) = delete;
    dflash_coupling & operator=(const dflash_coupling &) = delete;

    void apply(llama_token_data_array & p);

private:
    const dflash_q_row * row;
    dflash_rng         & rng;
    dflash_overlap     * overlap;
};

void dflash_apply_coupling(llama_token_data_array & p);
