// How many tokens to draft and to verify in each round, so that drafting never costs more than it gives.
//
// A round of B sequences that verifies n_1 .. n_B drafted tokens costs D(blocks) + V(B + n_1 + .. + n_B) milliseconds and
// yields on average sum over sequences of 1 + P_1 + .. + P_n tokens, where P_i is the chance that the first i drafted tokens
// are all accepted. Both sides are learned while running:
//  * D and V by the number of blocks and of rows, from the rounds themselves;
//  * the chance of a position from the draft's own confidence, calibrated by what was accepted at that confidence.
// With the time t that a token takes at present, tokens are worth verifying as long as the sum of their P exceeds the added
// cost over t. A sequence whose drafts gained less than they cost goes on plainly and tries again now and then.
//
// Bias: a sampled draft may only be cut by what does not depend on the token that is dropped, or the accepted text would
// not follow the target's distribution. For such blocks position i is judged by confidences up to its own, which were
// computed before its token was drawn, and by averages for what follows (see cut_sampled).

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// milliseconds by size (blocks or rows), smoothed; sizes never seen are interpolated
class dflash_cost {
public:
    void add(int32_t size, double ms);

    bool   seen (int32_t size, int32_t times) const;
    bool   known(int32_t size) const; // measured twice, or well between sizes that were
    double at   (int32_t size) const; // 0 before the first sample

private:
    struct entry {
        double  ms = 0.0;
        int32_t n  = 0;
    };
    std::vector<entry> table; // by size
};

// one drafted block of a round
struct dflash_pace_block {
    int32_t seq     = 0;
    bool    sampled = false;        // its tokens were drawn at random and face rejection sampling
    bool    fixed   = false;        // keep all tokens: the length must not depend on measured time
    std::vector<float> confidence;  // per drafted token: probability of the likeliest candidate
    int32_t n = 0;                  // out: tokens to verify
};

class dflash_pace {
public:
    dflash_pace(uint32_t n_seq, int32_t n_draft_max);

    // a new text begins in this sequence
    void restart(int32_t seq);

    // Begin a round of these sequences and decide for each of them whether it drafts now.
    // fixed: sequences that must draft always
    void begin(const std::vector<int32_t> & seqs, const std::vector<bool> & fixed, std::vector<bool> & drafts);

    // what drafting `n_blocks` blocks has cost, features included
    void drafted(int32_t n_blocks, double ms);

    // choose `n` of every block; other sequences of the round verify one row each
    void cut(std::vector<dflash_pace_block> & blocks);

    // rows that the round verifies as decided: one per sequence and the drafted tokens
    int32_t n_rows() const { return rows; }

    // what the target's pass over n_rows rows has cost, sampling included
    void verified(int32_t n_rows, double ms);

    // how many drafted tokens of this sequence were accepted, of `n_verified` (at most the block's n) that were verified
    void accepted(int32_t seq, int32_t n_accepted, int32_t n_verified);

    // drafting was switched off in all sequences for so long that a user should know; true once
    bool gave_up();

    // for statistics and tests
    double plain_ms () const; // of one round without drafts, per token
    double gain     (int32_t seq) const; // milliseconds saved per draft before its own cost, smoothed
    double draft_ms () const; // of one block
    double accepted_mean() const { return mean_accepted; } // tokens per verified draft

private:
    enum { N_POSITION = 4, N_BUCKET = 10 };

    struct rate {
        double hits = 0.0;
        double n    = 0.0;
    };

    struct sequence {
        double  gain     = 0.0;  // smoothed, ms per draft
        int32_t n_gains  = 0;    // drafts of this text that it was learned from
        int32_t interval = 0;    // rounds between tries while off
        int32_t wait     = 0;    // rounds until the next try
        int32_t trial    = 0;    // rounds still to draft whatever the mean says
        bool    probing  = false;
        // this text's acceptance against the prediction
        double  hits     = 0.0;
        double  expected = 0.0;
        // of the round
        bool    sampled  = false;
        std::vector<float> confidence;
        std::vector<double> chance;
        int32_t n        = 0;
    };

    double token_ms() const; // what a token costs at present
    double chance  (const sequence & s, bool sampled, int32_t position, float confidence) const;
    int32_t cut_sampled(const sequence & s, const std::vector<double> & chance, double t, int32_t base) const;
    double  mean_chance(const sequence & s, bool sampled, int32_t position) const;
    void    settle();

    rate & bucket(bool sampled, int32_t position, float confidence);
    const rate & bucket(bool sampled, int32_t position, float confidence) const;

    const int32_t n_draft_max;

    std::vector<sequence> sequences;

    dflash_cost cost_draft;
    dflash_cost cost_verify;

    rate rates [2][N_POSITION][N_BUCKET]; // [sampled][position][confidence]
    rate totals[2][N_POSITION];           // n: sum of confidences

    // of the round
    std::vector<int32_t> members;
    int32_t blocks   = 0;
    int32_t rows     = 0;
    double  ms_draft = 0.0;
    double  ms_verify = 0.0;
    double  tokens   = 0.0;
    int32_t explore  = 0;    // by how much lengths are changed to learn
    bool    probing  = false;
    bool    last_drafted = false;

    int64_t n_gains       = 0;
    int32_t n_learn       = 16;  // rounds that may still be spent on learning what a plain one costs
    int32_t n_since_plain = 0;
    double  probe_ms      = 0.0; // time that tries may take

    double  gain_mean     = 0.0;  // over all sequences: where a new text starts
    bool    gain_known    = false;
    double  speed         = 1.0;  // tokens per ms against plain rounds, smoothed
    double  mean_accepted = 0.0;
    int64_t n_judged      = 0;
    int64_t n_drafts      = 0;
    int64_t n_off         = 0;    // rounds in a row without any draft that paid
    int64_t n_texts       = 0;
    bool    told          = false;
};
