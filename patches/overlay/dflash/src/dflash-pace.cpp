#include "dflash-pace.h"

#include <algorithm>
#include <cmath>

// smoothing of costs and gains, and how tries are spaced
static const double  COST_ALPHA    = 0.1;
static const double  GAIN_ALPHA    = 0.06; // of a text that was drafted for long: single drafts vary by more than their mean
static const double  GAIN_PRIOR    = 3.0;  // drafts that the mean over all texts counts for at the start of one
static const double  TRIAL_ALPHA   = 0.25;
static const double  SPEED_ALPHA   = 0.05;
static const double  PROBE_SHARE   = 0.01; // of the time may go into tries that fail
static const int32_t PROBE_MIN     = 16;  // rounds between two tries of a sequence
static const int32_t PROBE_MAX     = 512;
static const int32_t TRIAL_ROUNDS  = 8;
static const int32_t EXPLORE_EVERY = 32;
static const int32_t PLAIN_EVERY   = 64;
static const int64_t GIVE_UP       = 256;
static const double  PRIOR_WEIGHT  = 10.0;
static const double  RATE_MEMORY   = 200.0;

void dflash_cost::add(int32_t size, double ms) {
    if (size < 1 || size > 4096 || !(ms > 0.0)) {
        return;
    }
    if ((size_t) size >= table.size()) {
        table.resize(size + 1);
    }
    auto & e = table[size];
    if (e.n == 0) {
        e.ms = ms;
    } else {
        // a pause of the machine says nothing about the work
        const double x     = std::min(ms, (e.n < 4 ? 2.0 : 1.3) * e.ms);
        const double alpha = std::max(COST_ALPHA, 1.0 / (e.n + 1));
        e.ms += alpha * (x - e.ms);
    }
    e.n++;
}

bool dflash_cost::seen(int32_t size, int32_t times) const {
    return size >= 0 && (size_t) size < table.size() && table[size].n >= times;
}

bool dflash_cost::known(int32_t size) const {
    if (seen(size, 2)) {
        return true;
    }
    int32_t lo = 0;
    for (int32_t i = 1; i < (int32_t) table.size(); ++i) {
        if (table[i].n < 2) {
            continue;
        }
        if (i > size) {
            return lo > 0 && i <= 4 * lo;
        }
        lo = i;
    }
    return false;
}

double dflash_cost::at(int32_t size) const {
    int32_t lo = -1;
    int32_t hi = -1;
    for (int32_t i = 1; i < (int32_t) table.size(); ++i) {
        if (table[i].n == 0) {
            continue;
        }
        if (i <= size) {
            lo = i;
        } else {
            hi = i;
            break;
        }
    }
    if (lo == size && lo > 0) {
        return table[lo].ms;
    }
    if (lo > 0 && hi > 0) {
        const double f = (double) (size - lo) / (hi - lo);
        return table[lo].ms + f * std::max(0.0, table[hi].ms - table[lo].ms);
    }
    if (lo > 0) {
        // beyond all samples: along the slope of the two largest, or in proportion if there is only one
        int32_t before = -1;
        for (int32_t i = 1; i < lo; ++i) {
            if (table[i].n > 0) {
                before = i;
            }
        }
        if (before < 0) {
            return table[lo].ms * size / lo;
        }
        const double slope = std::max(0.0, (table[lo].ms - table[before].ms) / (lo - before));
        return table[lo].ms + slope * (size - lo);
    }
    // below all samples: a pass costs at least this share of a larger one
    return hi > 0 ? table[hi].ms * std::max(0.5, (double) size / hi) : 0.0;
}

dflash_pace::dflash_pace(uint32_t n_seq, int32_t n_draft_max) : n_draft_max(n_draft_max), sequences(n_seq) {}

void dflash_pace::restart(int32_t seq) {
    if (seq < 0 || (size_t) seq >= sequences.size()) {
        return;
    }
    auto & s = sequences[seq];
    const int32_t interval = s.interval;
    s = sequence();
    s.gain     = gain_mean;
    s.interval = interval;
    // a text of another kind may be worth drafting: try at once, but not with a draft that has failed on all lately
    n_texts++;
    s.wait = n_off < GIVE_UP || n_texts % 8 == 0 ? 0 : interval;
}

double dflash_pace::plain_ms() const {
    const int32_t n = std::max<int32_t>(1, (int32_t) members.size());
    return cost_verify.at(n) / n;
}

double dflash_pace::token_ms() const {
    return plain_ms() / std::max(1.0, speed);
}

double dflash_pace::draft_ms() const {
    const int32_t n = std::max(1, blocks);
    return cost_draft.at(n) / n;
}

double dflash_pace::gain(int32_t seq) const {
    return sequences[seq].gain;
}

// the previous round is over: what did it yield for its time?
void dflash_pace::settle() {
    if (blocks > 0 && tokens > 0.0 && ms_verify > 0.0 && plain_ms() > 0.0) {
        const double rate = tokens / (ms_draft + ms_verify) * plain_ms();
        speed += SPEED_ALPHA * (std::min(rate, 64.0) - speed);
    } else if (blocks == 0 && ms_verify > 0.0) {
        speed += SPEED_ALPHA * (1.0 - speed);
    }
    // tries live on a share of the time
    const double most = 2.0 * cost_draft.at(std::max<int32_t>(1, (int32_t) members.size()));
    probe_ms = std::min(most, probe_ms + PROBE_SHARE * (ms_draft + ms_verify));
    if (probing) {
        probe_ms -= ms_draft + std::max(0.0, ms_verify - cost_verify.at((int32_t) members.size()));
        probing   = false;
    }
    blocks = 0;
    tokens = ms_draft = ms_verify = 0.0;
}

void dflash_pace::begin(const std::vector<int32_t> & seqs, const std::vector<bool> & fixed, std::vector<bool> & drafts) {
    settle();
    members = seqs;
    drafts.assign(seqs.size(), false);
    rows = (int32_t) seqs.size();

    for (const int32_t seq : seqs) {
        sequences[seq].n = 0;
    }

    // learn what both kinds of round cost before any choice
    const int32_t n = (int32_t) seqs.size();
    const bool first_plain = last_drafted && n_learn > 0 && !cost_verify.known(n);
    n_learn -= first_plain;
    const bool learn_plain = first_plain || ++n_since_plain >= (speed < 1.25 ? PLAIN_EVERY : 4 * PLAIN_EVERY);

    bool any = false;
    std::vector<size_t> tries;
    for (size_t i = 0; i < seqs.size(); ++i) {
        auto & s = sequences[seqs[i]];
        s.probing = false;
        if (fixed[i]) {
            drafts[i] = true;
            continue;
        }
        if (learn_plain) {
            continue;
        }
        const double d = cost_draft.at(n) / n;
        bool on = !gain_known || s.trial > 0 || s.gain > d;
        if (!on) {
            if (s.wait <= 0) {
                tries.push_back(i);
            } else {
                s.wait--;
            }
        } else {
            s.trial = std::max(0, s.trial - 1);
            any = true;
        }
        drafts[i] = on;
    }
    // tries share one draft; those that the budget does not allow yet wait for company
    if (!tries.empty() && (any || probe_ms >= cost_draft.at((int32_t) tries.size()))) {
        for (const size_t i : tries) {
            drafts[i] = sequences[seqs[i]].probing = true;
        }
        probing = true;
    }
    if (std::none_of(drafts.begin(), drafts.end(), [](bool d) { return d; })) {
        n_since_plain = 0;
    }
    last_drafted = std::any_of(drafts.begin(), drafts.end(), [](bool d) { return d; });
    n_off = any || learn_plain ? 0 : n_off + 1;
}

void dflash_pace::drafted(int32_t n_blocks, double ms) {
    blocks   = n_blocks;
    ms_draft = ms;
    cost_draft.add(n_blocks, ms);
}

static int32_t dflash_pace_bucket(float confidence, int32_t n) {
    return std::min(n - 1, std::max(0, (int32_t) (confidence * (float) n)));
}

dflash_pace::rate & dflash_pace::bucket(bool sampled, int32_t position, float confidence) {
    return rates[sampled][std::min<int32_t>(position, N_POSITION - 1)][dflash_pace_bucket(confidence, N_BUCKET)];
}

const dflash_pace::rate & dflash_pace::bucket(bool sampled, int32_t position, float confidence) const {
    return rates[sampled][std::min<int32_t>(position, N_POSITION - 1)][dflash_pace_bucket(confidence, N_BUCKET)];
}

double dflash_pace::chance(const sequence & s, bool sampled, int32_t position, float confidence) const {
    const rate & r = bucket(sampled, position, confidence);
    // before a confidence was seen often: what others at this position were worth, in proportion
    const rate & t = totals[sampled][std::min<int32_t>(position, N_POSITION - 1)];
    const double prior = std::min(0.99, (t.hits + PRIOR_WEIGHT * 0.45) / (t.n + PRIOR_WEIGHT * 0.5) * confidence);
    const double base  = (r.hits + PRIOR_WEIGHT * prior) / (r.n + PRIOR_WEIGHT);
    const double text  = (s.hits + 16.0) / (s.expected + 16.0);
    return std::min(0.999, std::max(0.001, base * text));
}

// over all confidences: what to expect of a position that is not drawn yet
double dflash_pace::mean_chance(const sequence & s, bool sampled, int32_t position) const {
    double hits = PRIOR_WEIGHT * 0.5;
    double n    = PRIOR_WEIGHT;
    for (const auto & r : rates[sampled][std::min<int32_t>(position, N_POSITION - 1)]) {
        hits += r.hits;
        n    += r.n;
    }
    const double text = (s.hits + 16.0) / (s.expected + 16.0);
    return std::min(0.999, std::max(0.001, hits / n * text));
}

// Position i may be judged by chance[0 .. i]: each was known before the token at its own position was drawn. What follows is
// not known yet at that point and enters by its mean.
int32_t dflash_pace::cut_sampled(const sequence & s, const std::vector<double> & chance, double t, int32_t base) const {
    const int32_t n_max = (int32_t) chance.size();
    double p = 1.0;
    int32_t n = 0;
    while (n < n_max) {
        double       reach = p;
        double       sum   = 0.0;
        bool         worth = false;
        const double here  = cost_verify.at(base + n);
        for (int32_t j = n; j < n_max && !worth; ++j) {
            reach *= j == n ? chance[j] : mean_chance(s, true, j);
            sum   += reach;
            worth  = sum * t > cost_verify.at(base + j + 1) - here;
        }
        if (!worth) {
            break;
        }
        p *= chance[n];
        n++;
    }
    return n;
}

void dflash_pace::cut(std::vector<dflash_pace_block> & list) {
    ++n_drafts;
    explore = n_drafts % EXPLORE_EVERY == 0 ? 1 : n_drafts % EXPLORE_EVERY == EXPLORE_EVERY / 2 ? -1 : 0;

    const int32_t base   = (int32_t) members.size();
    const bool    learned = cost_verify.known(base) || (n_learn == 0 && cost_verify.at(base) > 0.0);
    const double  t       = token_ms();
    const double  t_plain = plain_ms();

    struct candidate {
        double  p;
        int32_t block;
    };
    std::vector<candidate> pool;

    int32_t extra = 0; // drafted tokens to verify so far
    for (size_t b = 0; b < list.size(); ++b) {
        auto & block = list[b];
        auto & s     = sequences[block.seq];
        const int32_t n_max = std::min<int32_t>((int32_t) block.confidence.size(), n_draft_max);

        s.sampled = block.sampled;
        s.confidence.assign(block.confidence.begin(), block.confidence.begin() + n_max);
        s.chance.resize(n_max);
        for (int32_t i = 0; i < n_max; ++i) {
            s.chance[i] = chance(s, block.sampled, i, block.confidence[i]);
        }
        block.n = 0;

        if (block.fixed || !learned || n_max == 0) {
            block.n = n_max;
        } else if (block.sampled) {
            block.n = cut_sampled(s, s.chance, t, base);
        } else {
            double p = 1.0;
            for (int32_t i = 0; i < n_max; ++i) {
                p *= s.chance[i];
                pool.push_back({ p, (int32_t) b });
            }
            continue;
        }
        extra += block.n;
    }

    // Tokens of all other blocks in the order of their chances, as many as give the best balance. Within a block chances
    // fall with the position, so that order always takes prefixes (equal ones keep theirs: the sort is stable).
    std::stable_sort(pool.begin(), pool.end(), [](const candidate & a, const candidate & b) { return a.p > b.p; });
    double  best  = 0.0;
    double  sum   = 0.0;
    size_t  n_take = 0;
    const double here = cost_verify.at(base + extra);
    for (size_t m = 0; m < pool.size(); ++m) {
        sum += pool[m].p;
        const double value = sum * t - (cost_verify.at(base + extra + (int32_t) m + 1) - here);
        if (value > best) {
            best   = value;
            n_take = m + 1;
        }
    }
    for (size_t m = 0; m < n_take; ++m) {
        list[pool[m].block].n++;
    }

    rows = base;
    for (auto & block : list) {
        auto & s = sequences[block.seq];
        const int32_t n_max = (int32_t) s.chance.size();

        // a length that is never tried is never known; a try that verifies nothing teaches nothing
        if (!block.fixed && learned) {
            if (explore > 0 || (s.probing && block.n == 0)) {
                block.n = std::min(n_max, block.n + 1);
            } else if (explore < 0 && !block.sampled) { // a drawn token that was looked at must not be dropped
                block.n = std::max(std::min(1, n_max), block.n - 1);
            }
        }
        s.n   = block.n;
        rows += block.n;
        blocks = std::max(blocks, 1);

        if (block.fixed || !learned) {
            continue;
        }
        // what this draft saves before its own cost: its tokens' time in plain rounds less the added rows
        double reach = 1.0;
        double saved = 0.0;
        for (int32_t i = 0; i < block.n; ++i) {
            reach *= s.chance[i];
            saved += reach * t_plain;
        }
        saved = std::max(0.0, saved - std::max(0.0, cost_verify.at(base + block.n) - cost_verify.at(base)));

        if (!gain_known) {
            gain_known = true;
            gain_mean  = saved;
            for (auto & other : sequences) {
                other.gain  = saved;
                other.trial = 2 * TRIAL_ROUNDS;
            }
        }
        n_gains++;
        const double d = draft_ms();
        if (s.probing) {
            if (saved > d) {
                s.trial = TRIAL_ROUNDS;
            } else {
                s.interval = std::min(PROBE_MAX, 2 * std::max(PROBE_MIN / 2, s.interval));
                s.wait     = s.interval;
            }
        }
        s.gain += std::max(s.probing ? TRIAL_ALPHA : GAIN_ALPHA, 1.0 / (GAIN_PRIOR + s.n_gains)) * (saved - s.gain);
        s.n_gains++;
        if (s.gain > d) {
            s.interval = 0;
        }
        gain_mean += std::max(0.02, 1.0 / (n_gains + 1)) * (saved - gain_mean);
    }
}

void dflash_pace::verified(int32_t n_rows, double ms) {
    cost_verify.add(n_rows, ms);
    ms_verify = ms;
    tokens   += (double) members.size();
}

void dflash_pace::accepted(int32_t seq, int32_t n_accepted, int32_t n_verified) {
    if (seq < 0 || (size_t) seq >= sequences.size()) {
        return;
    }
    auto & s = sequences[seq];
    s.n     = std::min(s.n, n_verified);
    tokens += n_accepted;
    if (s.n > 0) {
        n_judged++;
        mean_accepted += std::max(0.02, 1.0 / n_judged) * (n_accepted - mean_accepted);
    }
    // positions behind the first refusal were not tested
    for (int32_t i = 0; i < s.n && i <= n_accepted; ++i) {
        const double hit = i < n_accepted ? 1.0 : 0.0;
        auto & r = bucket(s.sampled, i, s.confidence[i]);
        if (r.n > RATE_MEMORY) {
            r.hits *= 0.995;
            r.n    *= 0.995;
        }
        const double text = (s.hits + 16.0) / (s.expected + 16.0);
        r.hits += hit;
        r.n    += 1.0;
        auto & t = totals[s.sampled][std::min<int32_t>(i, N_POSITION - 1)];
        if (t.n > RATE_MEMORY) {
            t.hits *= 0.995;
            t.n    *= 0.995;
        }
        t.hits += hit;
        t.n    += s.confidence[i]; // of the totals: the sum of confidences
        s.hits     = 0.99 * s.hits     + hit;
        s.expected = 0.99 * s.expected + s.chance[i] / text;
    }
    s.n = 0;
}

bool dflash_pace::gave_up() {
    if (told || n_off < GIVE_UP) {
        return false;
    }
    told = true;
    return true;
}
