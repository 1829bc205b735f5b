//! Who of those that wait goes first.

use super::*;

/// One worker with room for one turn of 100 blocks at a time, with this order.
fn narrow(order: &str) -> Driver {
    let policy = format!("homing:pace_s=0:order={order}");
    Driver::with_workers(&policy, &small_pool(&[Role::Both], 2_000))
}

/// A turn of this session and priority, too long to run beside another.
fn large(driver: &mut Driver, session: u64, priority: i32) -> RequestId {
    let hint = SessionHint::Explicit(u128::from(session));
    driver.ranked_turn(hint, prompt(session, 0, 100), None, (50, priority))
}

/// Serves whoever has a leg, until nobody has: the sessions in the order in which they were served.
fn served_in_order(driver: &mut Driver) -> Vec<RequestId> {
    let mut served = Vec::new();
    while let Some(leg) = driver.legs.keys().next().copied() {
        driver.serve(leg.request);
        served.push(leg.request);
    }
    assert!(driver.router.idle(), "nobody is left waiting");
    served
}

#[test]
fn priority_goes_first_and_lower_is_earlier() {
    for order in ["arrival", "work", "service"] {
        let mut driver = narrow(order);
        let requests: Vec<_> = [0, 5, 0, -3, 5]
            .into_iter()
            .zip(0..)
            .map(|(priority, session)| large(&mut driver, session, priority))
            .collect();
        let expected = [0, 3, 2, 1, 4].map(|index: usize| requests[index]);
        assert_eq!(served_in_order(&mut driver), expected, "{order}");
    }
}

#[test]
fn by_service_the_session_that_had_least_goes_first() {
    let check = |order: &str, expected: [usize; 3]| {
        let mut driver = narrow(order);
        for (session, seconds) in [(1, 100), (2, 10)] {
            let request = large(&mut driver, session, 0);
            driver.first_token(driver.leg(request));
            driver.wait(Duration::from_secs(seconds));
            driver.finished(driver.leg(request), None);
        }
        let running = large(&mut driver, 9, 0);
        let requests = [1, 2, 3].map(|session| large(&mut driver, session, 0));
        let served = served_in_order(&mut driver);
        assert_eq!(served[0], running);
        assert_eq!(served[1..], expected.map(|index| requests[index]), "{order}");
    };
    check("arrival", [0, 1, 2]);
    check("service", [2, 1, 0]);
}

#[test]
fn by_work_the_turn_that_lacks_far_less_goes_first() {
    let check = |order: &str, expected: [usize; 3]| {
        let policy = format!("homing:pace_s=0:order={order}");
        let mut driver = Driver::with_workers(&policy, &small_pool(&[Role::Both], 17_000));
        let mut turn = |blocks: u32, session: u64| {
            let hint = SessionHint::Explicit(u128::from(session));
            driver.turn(hint, prompt(session, 0, blocks), 50)
        };
        let running = turn(1_000, 0);
        let requests = [(990, 1), (70, 2), (995, 3)].map(|(blocks, session)| turn(blocks, session));
        let served = served_in_order(&mut driver);
        assert_eq!(served[0], running);
        assert_eq!(served[1..], expected.map(|index| requests[index]), "{order}");
    };
    check("arrival", [0, 1, 2]);
    check("service", [0, 1, 2]);
    check("work", [1, 0, 2]);
}

#[test]
fn who_has_waited_too_long_goes_first_whatever_its_priority() {
    let served_second = |waits: Duration| {
        let mut driver = narrow("service");
        let running = large(&mut driver, 0, 0);
        driver.first_token(driver.leg(running));
        let patient = large(&mut driver, 1, 7);
        driver.wait(waits);
        let urgent = large(&mut driver, 2, -7);
        driver.finished(driver.leg(running), None);
        let served = served_in_order(&mut driver);
        (served[0] == patient, served[0] == urgent)
    };
    assert_eq!(served_second(Duration::from_secs(59)), (false, true));
    assert_eq!(served_second(Duration::from_secs(60)), (true, false));
}

#[test]
fn room_that_is_kept_for_one_is_not_kept_from_those_of_better_priority() {
    let mut driver = narrow("arrival");
    let running = driver.turn(SessionHint::Recognise, prompt(0, 0, 60), 50);
    driver.first_token(driver.leg(running));
    let large = large(&mut driver, 1, 1);
    driver.wait(Duration::from_secs(11));
    let mut small = |priority: i32, session: u64| {
        let hint = SessionHint::Explicit(u128::from(session));
        let request = driver.ranked_turn(hint, prompt(session, 0, 10), None, (50, priority));
        driver.legs.keys().any(|leg| leg.request == request)
    };
    assert!(!small(1, 2), "room is kept from its equals");
    assert!(small(0, 3), "those who may go first take what there is");
    driver.wait(Duration::from_secs(50));
    let late = driver.ranked_turn(SessionHint::Explicit(4), prompt(4, 0, 10), None, (50, 0));
    assert!(
        driver.legs.keys().all(|leg| leg.request != late),
        "once it has waited too long, nobody goes before it"
    );
    assert!(
        driver
            .router
            .explain(large)
            .is_some_and(|explained| explained.state == "waiting")
    );
}
