//! Whose KV is cached, against a map of last contexts that is asked block by block.

use crate::driver::{Driver, small, tokens};
use homing_engine::ResidentLimits;
use homing_engine::api::{Input, Owner, Transfer};
use homing_kv::{BlockHash, hash_blocks};
use homing_units::{RequestId, SessionId};
use std::collections::BTreeMap;

const LIMITS: ResidentLimits = ResidentLimits {
    sessions: 5,
    blocks: 60,
};

fn remembering(blocks: u32) -> Driver {
    let mut driver = Driver::new(small(blocks));
    driver.engine.remember_sessions(LIMITS);
    driver
}

fn asks(driver: &mut Driver, id: u64, session: u64, prompt: &[u32]) {
    driver.owner = Some(Owner {
        session: SessionId(session),
        kind: 0,
    });
    driver.submit(id, prompt, 1, Transfer::None);
}

/// What it says of each session: blocks of the context, of the prompt, and cached ones.
fn said(driver: &Driver) -> Vec<(u64, usize, u32, u32)> {
    let residents = driver.engine.residents();
    residents
        .iter()
        .map(|of| (of.session.0, of.context.len(), of.prompt_blocks, of.cached_blocks))
        .collect()
}

#[test]
fn what_is_said_of_sessions_is_what_is_cached_of_their_last_contexts() {
    for seed in 0..20_u64 {
        let mut state = seed;
        let mut below = |bound: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let mut driver = remembering(40);
        // By session: the latest context; the latest session last.
        let (mut contexts, mut order) = (BTreeMap::new(), Vec::new());
        for id in 0..120 {
            let session = below(8);
            let length = usize::try_from(5 + below(60)).unwrap();
            // One in four has another history.
            let content = u32::try_from(session * 2 + u64::from(below(4) == 0)).unwrap();
            let prompt = tokens(content, length);
            asks(&mut driver, id, session, &prompt);
            if below(6) == 0 {
                driver.input(Input::Abort(RequestId(id)));
            }
            driver.run();
            if below(20) == 0 {
                driver.input(Input::ClearCache);
            }
            contexts.insert(session, hash_blocks(&prompt, 4));
            order.retain(|other| *other != session);
            order.push(session);
            driver.engine.check_invariants();
            let cached = |context: &[BlockHash]| context.iter().take_while(|hash| driver.cache.contains(hash)).count();
            let residents = driver.engine.residents();
            assert!(
                residents.len() <= LIMITS.sessions && !residents.is_empty(),
                "seed {seed}"
            );
            for (resident, session) in residents.iter().zip(order.iter().rev()) {
                assert_eq!(resident.session.0, *session, "the latest is first, seed {seed}");
                let whole = &contexts[session];
                // The block of the last token is left out even where it is whole.
                assert!(whole.starts_with(&resident.context) && whole.len() - resident.context.len() <= 1);
                assert_eq!(
                    resident.cached_blocks as usize,
                    cached(&resident.context),
                    "seed {seed}, request {id}"
                );
            }
            let blocks: usize = residents.iter().map(|resident| resident.context.len()).sum();
            assert!(blocks <= LIMITS.blocks, "seed {seed}");
        }
    }
}

#[test]
fn a_session_with_a_request_here_is_left_out_until_it_ends() {
    let mut driver = remembering(40);
    assert_eq!(driver.engine.residents_version(), 0);
    asks(&mut driver, 1, 7, &tokens(1, 21));
    assert_eq!(said(&driver), []);
    driver.run();
    assert_eq!(said(&driver), [(7, 5, 5, 5)]);
    let version = driver.engine.residents_version();
    asks(&mut driver, 2, 7, &tokens(1, 30));
    assert_eq!(said(&driver), [], "its blocks come and go");
    assert_ne!(driver.engine.residents_version(), version);
    asks(&mut driver, 3, 8, &tokens(2, 9));
    driver.run();
    assert_eq!(said(&driver), [(8, 2, 2, 2), (7, 7, 7, 7)]);
    // Nobody was told to remember anything.
    let mut driver = Driver::new(small(40));
    asks(&mut driver, 1, 7, &tokens(1, 21));
    driver.run();
    assert_eq!(said(&driver), []);
}
