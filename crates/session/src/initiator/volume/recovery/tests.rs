use super::*;
use crate::initiator::opening::{Mode, OpeningConfig, OpeningMember, OpeningServer};
use crate::wire::{STATUS_LEN, VolumeStatus, status};
use alloc::vec;
use riopipe_order::attribute::{Member, StreamId, VolumeId};
use riopipe_order::log_region::MemberNamespace;

const VOLUME: VolumeId = VolumeId([7; 16]);
const TIMEOUT_NS: u64 = 1_000_000_000;

/// Two targets with one drive each.
fn driver(attempt: u32) -> RecoveryDriver {
    let server = |at: u8| OpeningServer {
        present: true,
        has_extension: true,
        has_log: true,
        logged: true,
        loses_log: false,
        transfer_bytes_max: 1 << 20,
        members: vec![OpeningMember {
            place: MemberNamespace { member: Member(at), nsid: 1 },
            prepare_blocks: 0,
            start: 256,
            blocks: 1000,
            volatile: false,
        }],
    };
    let config = OpeningConfig { volume: VOLUME, servers: vec![server(0), server(1)] };
    let mode = Mode::Reopen { generation: 3, streams: vec![StreamId(0)] };
    RecoveryDriver::new(Opening::new(config, mode, attempt).unwrap(), attempt, TIMEOUT_NS, 0)
}

fn status_page() -> alloc::vec::Vec<u8> {
    let status = VolumeStatus {
        volume: VOLUME,
        generation: 3,
        known: true,
        own: true,
        owned: true,
        streams: 1,
        slots: 8,
        ..VolumeStatus::default()
    };
    let page = status.encode();
    assert_eq!(page.len(), STATUS_LEN);
    page
}

#[test]
fn a_command_that_is_put_off_is_sent_again_after_a_rest_that_grows() {
    let mut driver = driver(1);
    let mut now = 0;
    let mut last = 0;
    for _ in 0..4 {
        let (ticket, _) = driver.next_command(0, now).expect("it is due");
        assert_eq!(driver.next_command(0, now), None, "nothing else is to be asked");
        driver.on_answer(0, ticket, Err(status::STREAM_BUSY), now).unwrap();
        assert_eq!(driver.next_command(0, now), None, "the target rests");
        let again = driver.deadline(now).expect("it is sent again");
        assert!(again - now > last && again - now <= RETRY_DELAY_NS_MAX);
        last = again - now;
        now = again;
    }
}

#[test]
fn a_target_that_puts_off_for_too_long_ends_the_attempt() {
    let mut driver = driver(1);
    let mut now = 0;
    let error = loop {
        let (ticket, _) = driver.next_command(0, now).expect("it is due");
        match driver.on_answer(0, ticket, Err(status::STREAM_BUSY), now) {
            Ok(()) => now = driver.deadline(now).expect("it is sent again"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, RecoveryError::PutOff { server: 0, .. }), "{error}");
    assert!(now > TIMEOUT_NS && now < 2 * TIMEOUT_NS, "{now}");
}

#[test]
fn p8_an_answer_owed_for_too_long_ends_the_attempt() {
    let mut driver = driver(1);
    let (first, _) = driver.next_command(0, 0).expect("the first target is asked");
    let (_second, _) = driver.next_command(1, 5).expect("the second, too");
    driver.on_answer(0, first, Ok(&status_page()), 10).unwrap();
    let deadline = driver.deadline(10).expect("the second owes an answer");
    driver.check_timeouts(deadline - 1).unwrap();
    let error = driver.check_timeouts(deadline).unwrap_err();
    assert!(matches!(error, RecoveryError::TimedOut { server: 1, .. }), "{error}");
}

#[test]
fn t23_an_answer_to_an_earlier_attempt_changes_nothing() {
    let mut earlier = driver(1);
    let (late, _) = earlier.next_command(0, 0).expect("the first target is asked");
    let mut driver = driver(2);
    let (_own, _) = driver.next_command(0, 0).expect("and asked again");
    driver.on_answer(0, late, Err(status::STREAM_BUSY), 20).unwrap();
    assert_eq!(driver.opening().in_flight(0), 1, "its own answer is still owed");
    assert!(driver.deadline(20).is_some_and(|at| at > 20 + RETRY_DELAY_NS_MAX), "it does not rest");
}

#[test]
fn the_time_of_each_step_is_its_own() {
    let mut driver = driver(1);
    for (server, now) in [(0, 3), (1, 5)] {
        let (ticket, _) = driver.next_command(server, 0).expect("it is asked");
        driver.on_answer(server, ticket, Ok(&status_page()), now).unwrap();
    }
    assert_eq!((driver.phase(), driver.step_times().claim), (Phase::List, 5));
}
