//! What the ledger charges whom for, and what its accounts deny.

use super::*;
use homing_kv::BlockHash;
use proptest::prelude::*;

fn prompt(own: u128, shared: u128, blocks: u128) -> Prompt {
    let hashes: Vec<_> = (0..blocks)
        .map(|index| BlockHash(if index < shared { index } else { own * 1_000 + index }))
        .collect();
    Prompt {
        blocks: hashes.into(),
        tokens: u32::try_from(blocks * 16 + 3).unwrap(),
    }
}

fn demand(decode: u32, prefill: Option<u32>) -> Demand {
    Demand {
        decode: WorkerId(decode),
        prefill: prefill.map(WorkerId),
        fetch: None,
        prompt: prompt(1, 0, 10),
        reserve_tokens: 200,
        tail_tokens: 40,
        prefill_tokens: 90,
        export_tokens: 70,
    }
}

#[test]
fn a_seed_charges_each_side_for_what_is_still_ahead() {
    let mut ledger = Ledger::default();
    let (decode, prefill) = (WorkerId(0), WorkerId(1));
    ledger.book(RequestId(1), demand(0, Some(1)));
    let waiting = Account {
        requests: 1,
        reserved_tokens: 200,
        seeds: 1,
        seed_tokens: 163,
        ..Account::default()
    };
    assert_eq!(ledger.account(decode), waiting);
    assert_eq!(
        ledger.account(prefill),
        Account {
            requests: 1,
            reserved_tokens: 70,
            prefill_tokens: 90,
            pending_pairs: 1,
            ..Account::default()
        }
    );
    ledger.advance(RequestId(1), Stage::Pull);
    assert_eq!(ledger.account(decode), waiting);
    assert_eq!(
        ledger.account(prefill),
        Account {
            requests: 1,
            reserved_tokens: 70,
            exports: 1,
            ..Account::default()
        }
    );
    assert_eq!(ledger.links().collect::<Vec<_>>(), [((prefill, decode), 1)]);
    ledger.advance(RequestId(1), Stage::Decode);
    assert_eq!(
        ledger.account(decode),
        Account {
            requests: 1,
            reserved_tokens: 200,
            decode_tokens: 163,
            decodes: 1,
            ..Account::default()
        }
    );
    assert_eq!(ledger.account(prefill), Account::default());
    ledger.check_invariants();
    assert!(ledger.release(RequestId(1)));
    assert!(!ledger.release(RequestId(1)));
    assert!(ledger.is_empty());
}

#[test]
fn what_runs_there_already_is_reserved_once() {
    let mut ledger = Ledger::default();
    let reserve = |ledger: &Ledger| ledger.reserve_tokens(WorkerId(0), &prompt(2, 6, 10), 50, 16);
    assert_eq!(reserve(&ledger), 163 + 50);
    ledger.book(
        RequestId(1),
        Demand {
            prompt: prompt(1, 6, 9),
            ..demand(0, None)
        },
    );
    assert_eq!(reserve(&ledger), 163 + 50 - 96);
}

#[test]
fn an_idle_worker_admits_what_is_over_its_bounds() {
    let limits = Limits {
        append_tokens_per_decode: 10,
        seed_tokens_per_decode: 10,
        ..Limits::default()
    };
    let idle = Account::default();
    assert_eq!(idle.denies_decode(1_000, 10, &limits), None);
    assert_eq!(idle.denies_append(1_000, &limits), None);
    assert_eq!(idle.denies_seed(1_000, &limits), None);
    assert_eq!(idle.denies_prefill(u32::MAX, &limits), None);
    let busy = Account {
        requests: 1,
        reserved_tokens: 5,
        seeds: 1,
        seed_tokens: 5,
        append_tokens: 5,
        ..idle
    };
    assert_eq!(busy.denies_decode(6, 10, &limits), Some(Denied::PoolFull));
    assert_eq!(busy.denies_decode(5, 10, &limits), None);
    assert_eq!(busy.denies_append(6, &limits), Some(Denied::AppendTokens));
    assert_eq!(busy.denies_seed(6, &limits), Some(Denied::Seeds));
}

proptest! {
    /// Whatever is booked, moved on and released: accounts are the sum of the bookings, and nothing stays.
    #[test]
    fn booking_and_release_balance(steps in prop::collection::vec((0..8_u64, 0..4_u32, 0..4_u32, 0..4_u8), 1..60)) {
        let mut ledger = Ledger::default();
        for (request, decode, prefill, step) in steps {
            let request = RequestId(request);
            match (ledger.bookings.contains_key(&request), step) {
                (false, _) => ledger.book(request, demand(decode, (prefill != decode).then_some(prefill))),
                (true, 0) => ledger.advance(request, Stage::Pull),
                (true, 1) => ledger.advance(request, Stage::Decode),
                (true, _) => prop_assert!(ledger.release(request)),
            }
            ledger.check_invariants();
        }
        for request in ledger.requests().collect::<Vec<_>>() {
            ledger.release(request);
        }
        prop_assert!(ledger.is_empty());
    }
}

#[test]
fn what_is_handed_over_leaves_no_room_for_as_much() {
    let mut ledger = Ledger::default();
    let source = WorkerId(1);
    ledger.book(RequestId(1), demand(0, Some(1)));
    let denied = |ledger: &Ledger, tokens: u64| ledger.account(source).denies_pool(tokens, 100);
    assert_eq!(denied(&ledger, 30), None);
    assert_eq!(denied(&ledger, 31), Some(Denied::PoolFull));
    ledger.advance(RequestId(1), Stage::Pull);
    assert_eq!(denied(&ledger, 31), Some(Denied::PoolFull), "until it is fetched");
    ledger.advance(RequestId(1), Stage::Decode);
    assert_eq!(denied(&ledger, 100), None);
}
