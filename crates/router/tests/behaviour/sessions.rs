//! Who a turn belongs to, and where its session lives.

use super::*;

#[test]
fn turns_of_a_session_come_home_however_it_is_known() {
    for (policy, roles, first) in [
        ("homing:local_tokens=1024", &PD[..], Path::Seed),
        ("homing", &DP[..], Path::Local),
        ("dp-cache-aware", &DP[..], Path::Local),
    ] {
        for hint in [RECOGNISE, SessionHint::Explicit(77)] {
            let mut driver = Driver::with_workers(policy, &workers(roles));
            let (path, home) = served(&mut driver, hint, prompt(1, 100, 100));
            assert_eq!(path, first);
            for turn in 1..5 {
                assert_eq!(
                    served(&mut driver, hint, prompt(1, 100, 100 + turn * 20)),
                    (Path::Append, home),
                    "{policy} {hint:?}"
                );
            }
            assert_eq!(driver.router.view_sessions(9).len(), 1);
        }
    }
}

#[test]
fn boilerplate_does_not_make_a_session_nor_a_herd() {
    for roles in [&PD[..], &[Role::Both; 4]] {
        let mut driver = Driver::with_workers("homing", &workers(roles));
        let mut placed: BTreeMap<u32, u32> = BTreeMap::new();
        for session in 0..100 {
            let (_, decode) = served(&mut driver, RECOGNISE, prompt(session, 60, 4));
            *placed.entry(decode).or_default() += 1;
            driver.wait(Duration::from_millis(700));
        }
        assert_eq!(driver.router.view_sessions(1_000).len(), 100);
        let (most, least) = (placed.values().max().unwrap(), placed.values().min().unwrap());
        assert!(f64::from(*most) / f64::from(*least) <= 1.3, "{placed:?}");
    }
}

#[test]
fn branches_forks_retries_and_rewritten_history_are_one_family() {
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    served(&mut driver, RECOGNISE, prompt(1, 50, 50));
    served(&mut driver, RECOGNISE, prompt(1, 50, 90));
    let sessions = |driver: &Driver| driver.router.view_sessions(99);
    // A retry, and a turn with a rewritten end, go on with the same session.
    served(&mut driver, RECOGNISE, prompt(1, 50, 90));
    let rewritten = |turn: u64, kept: usize| {
        let tail = prompt(turn, 0, 30);
        let blocks: Vec<_> = prompt(1, 50, 90).blocks[..50 + kept]
            .iter()
            .chain(tail.blocks.iter())
            .copied()
            .collect();
        let tokens = u32::try_from(blocks.len()).unwrap() * 16 + 1;
        Prompt::new(blocks, tokens, 16)
    };
    served(&mut driver, RECOGNISE, rewritten(70, 80));
    assert_eq!(sessions(&driver).len(), 1);
    // While a turn is in flight, another that shares history is a branch of the family, and finds its home.
    let running = driver.turn(RECOGNISE, rewritten(71, 78), 50);
    let branch = driver.turn(RECOGNISE, rewritten(72, 76), 50);
    assert_eq!(driver.decision(branch).decode, driver.decision(running).decode);
    let known = sessions(&driver);
    assert_eq!((known.len(), known[0].family == known[1].family), (2, true));
    driver.serve(running);
    driver.serve(branch);
    // A named session whose history is rewritten altogether stays the session.
    let named = SessionHint::Explicit(5);
    served(&mut driver, named, prompt(5, 50, 90));
    served(&mut driver, named, prompt(6, 10, 20));
    assert_eq!(sessions(&driver).len(), 3);
    // Its old blocks are nobody's now: who repeats them is new.
    served(&mut driver, RECOGNISE, prompt(5, 50, 95));
    assert_eq!(sessions(&driver).len(), 4);
}

/// A turn whose driver knows the tokens, from its start to its end; in which session it was, how it went and where.
fn compared(
    driver: &mut Driver,
    hint: SessionHint,
    prompt: Prompt,
    (id, continues): (u64, Option<u64>),
) -> (SessionId, Path, u32) {
    let facts = Compared {
        prompt: PromptId(id),
        continues: continues.map(PromptId),
    };
    let request = driver.compared_turn(hint, prompt, Some(facts), 50);
    driver.serve(request);
    let explanation = driver.router.explain(request).expect("it was asked just now");
    let session = explanation.session;
    let decision = driver.decision(request);
    (session, decision.path, decision.decode.0)
}

#[test]
fn questions_that_differ_in_their_last_tokens_are_sessions_of_their_own() {
    // Each question fits into the block after the same long instructions: all have the same blocks, and the same length.
    for roles in [&[Role::Prefill, Role::Decode, Role::Decode, Role::Decode][..], &DP] {
        for named in [false, true] {
            let hint = |client: u64| {
                if named {
                    SessionHint::Explicit(u128::from(client))
                } else {
                    RECOGNISE
                }
            };
            let mut driver = Driver::with_workers("homing", &workers(roles));
            let homes: Vec<_> = (0..6)
                .map(|client| compared(&mut driver, hint(client), prompt(0, 100, 0), (client, None)))
                .collect();
            let sessions: BTreeSet<_> = homes.iter().map(|(session, ..)| *session).collect();
            let workers: BTreeSet<_> = homes.iter().map(|(_, _, home)| *home).collect();
            assert_eq!((sessions.len(), workers.len()), (6, 3), "named: {named}, {homes:?}");
            for turn in 1..4 {
                for client in 0..6_u64 {
                    let (session, _, home) = homes[usize::try_from(client).unwrap()];
                    let own = u32::try_from(turn).unwrap() * 10;
                    let last = (turn - 1) * 10 + client;
                    let facts = (turn * 10 + client, Some(last));
                    assert_eq!(
                        compared(&mut driver, hint(client), prompt(client + 1, 100, own), facts),
                        (session, Path::Append, home),
                        "client {client}, turn {turn}, named: {named}"
                    );
                }
            }
        }
    }
}

#[test]
fn whoever_goes_on_to_the_token_is_of_the_family() {
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    let (session, ..) = compared(&mut driver, RECOGNISE, prompt(1, 50, 50), (0, None));
    // A retry is the same prompt again, even where the driver has forgotten it under that id.
    assert_eq!(
        compared(&mut driver, RECOGNISE, prompt(1, 50, 50), (0, None)).0,
        session
    );
    // A turn that goes on.
    assert_eq!(
        compared(&mut driver, RECOGNISE, prompt(1, 50, 90), (1, Some(0))).0,
        session
    );
    // History rewritten beyond the first prompt, although no known prompt is repeated.
    let rewritten: Vec<_> = prompt(1, 50, 70)
        .blocks
        .iter()
        .chain(prompt(9, 0, 30).blocks.iter())
        .copied()
        .collect();
    let rewritten = Prompt::new(rewritten, 150 * 16, 16);
    assert_eq!(
        compared(&mut driver, RECOGNISE, rewritten.clone(), (2, None)).0,
        session
    );
    // While a turn is in flight, another one that goes on from the same prompt is a branch, and its retry the branch's.
    let facts = |id, continues| {
        Some(Compared {
            prompt: PromptId(id),
            continues: Some(PromptId(continues)),
        })
    };
    let longer = |of: u64| {
        let blocks: Vec<_> = rewritten
            .blocks
            .iter()
            .chain(prompt(of, 0, 5).blocks.iter())
            .copied()
            .collect();
        Prompt::new(blocks, 155 * 16, 16)
    };
    let running = driver.compared_turn(RECOGNISE, longer(20), facts(3, 2), 50);
    let retry = driver.compared_turn(RECOGNISE, longer(20), facts(3, 2), 50);
    let branch = driver.compared_turn(RECOGNISE, longer(21), facts(4, 3), 50);
    let session_of = |driver: &Driver, request| driver.router.explain(request).unwrap().session;
    assert_eq!(
        (session_of(&driver, running), session_of(&driver, retry)),
        (session, session)
    );
    assert_ne!(session_of(&driver, branch), session);
    assert_eq!(driver.decision(branch).decode, driver.decision(running).decode);
    let views = driver.router.view_sessions(9);
    assert!(views.len() == 2 && views[0].family == views[1].family, "{views:?}");
    // A stranger who shares all whole blocks of the last prompt, but not its last tokens.
    let mut driver = Driver::with_workers("homing", &workers(&DP));
    let (first, ..) = compared(&mut driver, RECOGNISE, prompt(1, 50, 50), (0, None));
    let (second, path, _) = compared(&mut driver, RECOGNISE, prompt(1, 50, 60), (1, None));
    assert!(first != second && path == Path::Local);
    let views = driver.router.view_sessions(9);
    assert_ne!(views[0].family, views[1].family);
}

#[test]
fn sessions_are_bounded_and_expire() {
    let mut config = RouterConfig::default();
    config.limits.sessions = 10;
    config.limits.session_blocks = 500;
    let mut driver = Driver::with_config("homing", config, &workers(&DP));
    for session in 0..30 {
        served(&mut driver, RECOGNISE, prompt(session, 10, 20));
        driver.wait(Duration::from_secs(1));
    }
    assert_eq!(driver.router.session_count(), 10);
    served(&mut driver, RECOGNISE, prompt(99, 10, 240));
    assert_eq!(driver.router.session_count(), 9, "blocks are bounded, too");
    driver.wait(Duration::from_secs(3_601));
    driver.tell(Event::Timeout);
    assert_eq!(driver.router.session_count(), 0);
}

/// A session whose home is overloaded goes on elsewhere; with `migrate` its KV comes from its home, and nobody computes
/// the history anew.
#[test]
fn a_session_that_moves_takes_its_kv_along() {
    for migrate in [false, true] {
        let config = RouterConfig {
            migrate,
            ..RouterConfig::default()
        };
        let mut driver = Driver::with_config(
            "homing:moves=off:margin=0:margin_s=0:local_tokens=1800",
            config,
            &workers(&PD),
        );
        let session = SessionHint::Explicit(5);
        let (_, home) = served(&mut driver, session, prompt(1, 100, 100));
        // What was appended lies at its home only; what was seeded the prefill worker has, too.
        assert_eq!(served(&mut driver, session, prompt(1, 100, 200)), (Path::Append, home));
        assert_eq!(served(&mut driver, session, prompt(1, 100, 300)), (Path::Append, home));
        let turns = (0..40).map(|branch| prompt(1, 100, 301 + branch));
        let requests: Vec<RequestId> = turns.map(|prompt| driver.turn(session, prompt, 50)).collect();
        let moved = requests
            .into_iter()
            .find(|request| driver.decision(*request).decode.0 != home)
            .expect("an overloaded home is left");
        let decision = driver.decision(moved).clone();
        let source = decision.prefill.expect("its KV comes from elsewhere").0;
        assert_eq!(
            (decision.path, source == home),
            if migrate {
                (Path::Migrate, true)
            } else {
                (Path::Reseed, false)
            },
            "{decision:?}"
        );
        assert_eq!(decision.candidates[0].path, decision.path, "the chosen one comes first");
        // Both legs end, and nothing stays booked.
        let running: Vec<RequestId> = driver.live.keys().copied().collect();
        for request in running {
            driver.serve(request);
        }
        driver.router.check_invariants();
    }
}
