//! Whether and when sessions come back: a life table over how long they have been away.
//!
//! A session whose turn has ended is away until its next turn comes, or for good, and nobody says which. Who looks only at sessions that
//! came back takes gaps for short and all for faithful; who waits until the others are given up knows late. So all are counted for as
//! long as they were watched: time away is cut into bins, each twice as long as the one before it, and for each bin
//!
//! ```text
//! hazard  = came back in it / exposed to it             exposed = fate in it known + still in it / 2
//! here(b) = product of 1 - hazard over the bins before b    the share that has not come back until then
//! ```
//!
//! which is the actuaries' estimate: whoever is in a bin right now has been exposed to half of it. That somebody comes back within a
//! time, given how long he has been away already, when, and how often, all follow from the hazards (`Hazards`).
//!
//! What is kept for somebody who may come back costs room for as long as he is away. `densities` says what it brings: the most returns a
//! second of waiting that any limit to the waiting gives. So whose return is near is worth more than whose is as sure but far, and who is
//! overdue next to nothing. The idea is that of least hit density (Beckmann, Chen, Cidon: LHD, NSDI 2018); the limit is chosen as Gittins'
//! index does, so that there is no horizon to set.
//!
//! A table has something before it, which counts like so many sessions that were seen: nobody is sure of anything after three gaps. Old
//! gaps fade: at `MEMORY` fates in a bin all counts of the table are halved.

use homing_units::Duration;

/// Bins: the last one begins at 2^26 ms, 18 hours.
pub const BINS: usize = 28;

/// Fates in a bin after which what was learnt counts half.
const MEMORY: u32 = 4_096;

/// A session is expected back as long as so large a share of those that come back has not come.
const EXPECTED: f64 = 0.99;

/// Further turns that sessions are taken to have before any was seen: few for an agent, many for a chat.
const TURNS_BEFORE: f64 = 5.0;

/// Their gaps are spread evenly, by order of magnitude, over these bins, 1 to 32 s: coding agents' median is 5 to 10 s.
const BINS_BEFORE: std::ops::Range<usize> = 11..16;

/// The bin of a time away: bin 0 is less than a millisecond, bin b begins at 2^(b - 1) ms.
#[must_use]
pub fn bin_of(away: Duration) -> usize {
    let milliseconds = u64::try_from(away.as_millis()).unwrap_or(u64::MAX);
    ((u64::BITS - milliseconds.leading_zeros()) as usize).min(BINS - 1)
}

/// When a bin is over; `None` for the last one.
#[must_use]
pub fn bin_end(bin: usize) -> Option<Duration> {
    (bin + 1 < BINS).then(|| Duration::from_millis(1 << bin))
}

/// Seconds from a bin's beginning to its end; of the last one, as if it doubled the time away, too.
fn bin_lasts_s(bin: usize) -> f64 {
    (1_u64 << bin.saturating_sub(1)) as f64 / 1e3
}

/// What became of sessions, by how long they were away.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LifeTable {
    /// Sessions that came to the end of the bin or back within it.
    fates: [u32; BINS],
    /// Those of them that came back.
    came: [u32; BINS],
    /// Sessions that are in the bin now.
    inside: [u32; BINS],
}

impl LifeTable {
    /// A session has gone away just now.
    pub const fn leaves(&mut self) {
        self.inside[0] += 1;
    }

    /// One that was in this bin is in the next one.
    pub fn passes(&mut self, bin: usize) {
        self.ends(bin);
        self.inside[bin + 1] += 1;
    }

    /// One has come back in this bin.
    pub fn returns(&mut self, bin: usize) {
        self.came[bin] += 1;
        self.ends(bin);
    }

    /// One that was in this bin is remembered no longer: whoever comes after that is somebody new, so it has not come back.
    pub fn is_forgotten(&mut self, bin: usize) {
        self.ends(bin);
    }

    /// Sessions that are away.
    #[must_use]
    pub fn away(&self) -> u32 {
        self.inside.iter().sum()
    }

    /// Gaps that are remembered.
    #[must_use]
    pub fn gaps(&self) -> u32 {
        self.came.iter().sum()
    }

    fn ends(&mut self, bin: usize) {
        self.inside[bin] -= 1;
        self.fates[bin] += 1;
        if self.fates[bin] >= MEMORY {
            let halves = self.fates.iter_mut().chain(&mut self.came);
            halves.for_each(|count| *count /= 2);
        }
    }

    /// The hazards, where what was before counts like so many sessions, of which as many are left in each bin as its hazards leave.
    #[must_use]
    pub fn hazards(&self, before: &Hazards, sessions: f64) -> Hazards {
        let mut left = sessions;
        Hazards(std::array::from_fn(|bin| {
            let exposed = f64::from(self.fates[bin]) + f64::from(self.inside[bin]) / 2.0;
            let hazard = (f64::from(self.came[bin]) + left * before.0[bin]) / (exposed + left);
            left *= 1.0 - before.0[bin];
            hazard
        }))
    }
}

/// The share of those who are away at the beginning of a bin that comes back in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Hazards([f64; BINS]);

impl Hazards {
    /// What is taken to be so before anything was seen.
    #[must_use]
    pub fn before() -> Self {
        let gone = 1.0 / (TURNS_BEFORE + 1.0);
        let stays = libm::pow(gone, 1.0 / BINS_BEFORE.len() as f64);
        Self(std::array::from_fn(|bin| {
            if BINS_BEFORE.contains(&bin) { 1.0 - stays } else { 0.0 }
        }))
    }

    /// The share of sessions that come back within this time, of those that have been away for this bin's beginning. A bin in which
    /// the time ends counts in part.
    #[must_use]
    pub fn come(&self, from: usize, within: Duration) -> f64 {
        1.0 - self
            .bins(within)
            .skip(from)
            .fold(1.0, |away, (hazard, part)| away * (1.0 - hazard * part))
    }

    /// Further turns that a session has after one of its turns, where the next ones come like this one: the mean of a geometric
    /// distribution.
    #[must_use]
    pub fn turns(&self) -> f64 {
        let gone = 1.0 - self.come(0, Duration::MAX);
        (1.0 - gone) / gone.max(1.0 / f64::from(MEMORY))
    }

    /// Seconds that a session is away that comes back within this time, on average; `None` where none does.
    #[must_use]
    pub fn gap_s(&self, within: Duration) -> Option<f64> {
        let (mut away, mut came, mut sum_ms) = (1.0, 0.0, 0.0);
        for (bin, (hazard, part)) in self.bins(within).enumerate() {
            let comes = away * hazard * part;
            // Bin b lasts from 2^(b - 1) to 2^b milliseconds.
            sum_ms += comes * 0.75 * (1_u64 << bin) as f64;
            (away, came) = (away - comes, came + comes);
        }
        (came > 0.0).then(|| sum_ms / came / 1e3)
    }

    /// How long a session is expected back: until nearly all have come that come within the longest time, which is the bound.
    #[must_use]
    pub fn window(&self, longest: Duration) -> Duration {
        let wanted = 1.0 - EXPECTED * self.come(0, longest);
        let mut away = 1.0;
        let reached = self.bins(longest).position(|(hazard, part)| {
            away *= 1.0 - hazard * part;
            away <= wanted
        });
        reached.and_then(bin_end).map_or(longest, |end| end.min(longest))
    }

    /// For each bin, of somebody who has been away for its beginning: the most returns a second of waiting that any limit to the waiting gives,
    /// a limit being the end of a bin. Who comes back within a bin has waited for half of it.
    #[must_use]
    pub fn densities(&self) -> [f64; BINS] {
        std::array::from_fn(|from| {
            let (mut away, mut came, mut waited_s, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
            for (bin, hazard) in self.0.iter().enumerate().skip(from) {
                let comes = away * hazard;
                waited_s += bin_lasts_s(bin) * (away - comes / 2.0);
                (away, came) = (away - comes, came + comes);
                best = best.max(came / waited_s);
            }
            best
        })
    }

    /// The bins that begin within this time: their hazards, and how much of each lies within it.
    fn bins(&self, within: Duration) -> impl Iterator<Item = (f64, f64)> {
        let within_ms = within.as_millis() as f64;
        self.0.iter().enumerate().map_while(move |(bin, hazard)| {
            let begins_ms = if bin == 0 { 0.0 } else { (1_u64 << (bin - 1)) as f64 };
            let lasts_ms = begins_ms.max(1.0);
            (begins_ms < within_ms).then(|| (*hazard, ((within_ms - begins_ms) / lasts_ms).min(1.0)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LONGEST: Duration = Duration::from_secs(300);

    /// A table of sessions that came back after so many milliseconds, or have been away for so many.
    fn table(away: impl IntoIterator<Item = (u64, bool)>) -> LifeTable {
        let mut table = LifeTable::default();
        for (milliseconds, returned) in away {
            let bin = bin_of(Duration::from_millis(milliseconds));
            table.leaves();
            (0..bin).for_each(|passed| table.passes(passed));
            if returned {
                table.returns(bin);
            }
        }
        table
    }

    fn hazards(away: impl IntoIterator<Item = (u64, bool)>) -> Hazards {
        table(away).hazards(&Hazards::before(), 8.0)
    }

    #[test]
    fn before_anything_was_seen_a_session_has_a_few_turns_with_seconds_between_them() {
        let before = Hazards::before();
        assert!((before.turns() - 5.0).abs() < 1e-9, "{}", before.turns());
        let gap_s = before.gap_s(LONGEST).unwrap();
        assert!((5.0..10.0).contains(&gap_s), "{gap_s}");
        assert_eq!(before.window(LONGEST), Duration::from_millis(1 << 15));
        assert_eq!(table([]).hazards(&before, 8.0), before);
    }

    proptest! {
        /// Where each session's fate is known, the table says what counting says.
        #[test]
        fn with_all_fates_known_it_is_a_count(
            gaps in prop::collection::vec(0..1_u64 << 20, 1..200),
            gone in 0..200_usize,
            until in 0..20_usize,
            from in 0..20_usize,
        ) {
            let mut table = table(gaps.iter().map(|gap| (*gap, true)));
            for _ in 0..gone {
                table.leaves();
                (0..BINS - 1).for_each(|bin| table.passes(bin));
                table.is_forgotten(BINS - 1);
            }
            let hazards = table.hazards(&Hazards([0.0; BINS]), 1e-12);
            let end = bin_end(until.max(from)).unwrap();
            let there = gaps.iter().filter(|gap| bin_of(Duration::from_millis(**gap)) >= from).count();
            let comes = |gap: &&u64| bin_of(Duration::from_millis(**gap)) >= from && u128::from(**gap) < end.as_millis();
            let came = gaps.iter().filter(comes).count();
            let expected = if there + gone == 0 { 0.0 } else { came as f64 / (there + gone) as f64 };
            prop_assert!((hazards.come(from, end) - expected).abs() < 1e-6, "{} {expected}", hazards.come(from, end));
            prop_assert_eq!(table.away(), 0);
        }

        /// Whatever it was told, shares are shares and the window is within its bound.
        #[test]
        fn what_it_says_makes_sense(away in prop::collection::vec((any::<u64>(), any::<bool>()), 0..100), from in 0..BINS) {
            let hazards = hazards(away);
            prop_assert!((0.0..=1.0).contains(&hazards.come(from, Duration::MAX)));
            prop_assert!(hazards.come(from, LONGEST) <= hazards.come(from, Duration::MAX) + 1e-12);
            prop_assert!(hazards.window(LONGEST) <= LONGEST);
            prop_assert!(hazards.turns() >= 0.0 && hazards.turns() < f64::from(MEMORY));
            prop_assert!(hazards.gap_s(LONGEST).is_none_or(|gap| gap <= LONGEST.as_secs_f64() * 1.4));
        }
    }

    #[test]
    fn the_window_covers_nearly_all_gaps() {
        let check = |away: Vec<(u64, bool)>, expected_ms: u64| {
            assert_eq!(hazards(away).window(LONGEST), Duration::from_millis(expected_ms));
        };
        check(vec![(1_000, true); 4_000], 1_024);
        // One in ten is long, and one in two hundred.
        let mixed = |long: usize| (0..4_000).map(move |index| (if index % long == 0 { 30_000 } else { 1_000 }, true));
        check(mixed(10).collect(), 32_768);
        check(mixed(200).collect(), 1_024);
        // Those that never come make it no longer.
        check(mixed(10).chain((0..2_000).map(|_| (1 << 26, false))).collect(), 32_768);
        // None comes that soon.
        check(vec![(400_000, true); 4_000], 300_000);
    }

    #[test]
    fn whoever_has_been_away_for_longer_is_less_likely_to_come() {
        // Of a hundred, ninety come after 1 s, five after 100 s, five never.
        let of_hundred = |index: u64| match index % 100 {
            0..90 => (1_000, true),
            90..95 => (100_000, true),
            _ => (1 << 26, false),
        };
        let hazards = hazards((0..10_000).map(of_hundred));
        let check = |away_s: u64, expected: f64| {
            let share = hazards.come(bin_of(Duration::from_secs(away_s)), LONGEST);
            assert!(
                (share - expected).abs() < 0.02,
                "{away_s} s: {share}, expected {expected}"
            );
        };
        check(0, 0.95);
        check(10, 0.5);
        check(200, 0.0);
    }

    #[test]
    fn a_return_that_is_near_is_worth_more_than_one_that_is_overdue() {
        // Nine in ten come back after 1 s, and none of the others before an hour is over.
        let hazards = hazards((0..4_000).map(|index| (if index % 10 == 0 { 3_600_000 } else { 1_000 }, true)));
        let densities = hazards.densities();
        let density = |away_ms: u64| densities[bin_of(Duration::from_millis(away_ms))];
        // Nine returns in about 0.77 s each, and ten that wait 1.02 s.
        assert!((density(0) - 1.14).abs() < 0.06, "{}", density(0));
        assert!(density(600) > density(0), "{densities:?}");
        assert!(density(2_000) < density(0) / 100.0, "{densities:?}");
        // Who is nearly back after long is worth more than who has just become overdue.
        assert!(density(3_000_000) > 2.0 * density(60_000), "{densities:?}");
        assert_eq!(Hazards([0.0; BINS]).densities(), [0.0; BINS]);
    }

    #[test]
    fn old_gaps_fade() {
        let long = (0..4_000).map(|_| (60_000, true));
        let short = (0..100_000).map(|_| (500, true));
        assert_eq!(hazards(long.chain(short)).window(LONGEST), Duration::from_millis(512));
    }
}
