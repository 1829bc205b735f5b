//! The papers' stack, in one place: every experiment that has KVC in it takes cluster and router from here.
//!
//! Where the papers are silent other readings were run before this one was kept, which the document says: `mechanisms` has them.

use crate::setup::Setup;

/// Tokens of KV on each GPU of KVC v5: what a memory fraction of 0.90 leaves, at which the baseline's mean TTFT fits.
pub(super) const POOL: &str = "136K";
/// What decode workers keep KV in, and that they begin with a seed.
pub(super) const SLOTS: &str = "engine=session-slot:order=decode-first";
/// When a transfer has failed.
pub(super) const TIMEOUT: &str = "transfer_timeout=32s";
/// What a prefill worker makes of it.
pub(super) const DEAD_PEERS: &str = "dead_peers=on";
/// The router as the papers had it.
pub(super) const ROUTER: &str = "kv-aware";
/// The hardware of E2 and E3; its pools are the preset's.
pub(super) const FOUR_H200: &str = "h200x4-1p3d";

/// The hardware of KVC v5 with pools of this size.
pub(super) fn eight_h100(pool: &str) -> String {
    format!("h100x8-2p6d:kv={pool}")
}

/// The whole stack on some hardware.
pub(super) fn on(hardware: &str) -> String {
    format!("{hardware}:{SLOTS}:{TIMEOUT}:{DEAD_PEERS}")
}

/// The stack with the block engine instead of session slots.
pub(super) fn with_blocks_on(hardware: &str) -> String {
    format!("{hardware}:{TIMEOUT}:{DEAD_PEERS}")
}

/// The router with another option.
pub(super) fn router(option: &str) -> String {
    format!("{ROUTER}:{option}")
}

/// KVC v5 over ten seeds, with other sessions for each.
pub(super) fn v5() -> Setup {
    Setup::new("gen:swe52", &on(&eight_h100(POOL)), ROUTER).seeds(10)
}

/// KVC v5 again and again with the same sessions in the same order, as the papers ran it; three times three runs.
pub(super) fn reruns() -> Setup {
    let mut setup = v5().seeds(9);
    setup.trace = "gen:swe52:seed=1".to_owned();
    setup.keep_order()
}

/// KVC v5 with this router and so many seeds.
pub(super) fn v5_routed(policy: &str, seeds: u64) -> Setup {
    let mut setup = v5().seeds(seeds);
    policy.clone_into(&mut setup.policy);
    setup
}

/// KVC v5 on this cluster and so many seeds.
pub(super) fn v5_on(cluster: &str, seeds: u64) -> Setup {
    let mut setup = v5().seeds(seeds);
    cluster.clone_into(&mut setup.cluster);
    setup
}
