//! Authentication at the target: what a host may do before, during and after it.

mod world;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use riopipe_nvme::auth::{GroupId, HashId};
use riopipe_nvme::command::Sqe as Command;
use riopipe_nvme::dhchap_secret::DhchapSecret;
use riopipe_session::auth::controller::AuthRules;
use riopipe_session::auth::host::{HostAuth, HostAuthError, HostSecrets, HostStep};
use riopipe_session::target::limits::{AUTHENTICATION_NS, STALL_NS};
use riopipe_session::target::{Access, HostAccess};
use riopipe_testkit::peer;

use peer::{CC_ENABLE, Digests, HOSTID, HOSTNQN};
use world::{SUBNQN, World, block};

/// ATR in the result of Connect.
const MUST_AUTHENTICATE: u64 = 1 << 17;
const AUTHENTICATION_REQUIRED: u16 = 0x191;
const RECEIVE_BYTES: u32 = 4096;

fn random(bytes: &mut [u8]) {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    for byte in bytes {
        *byte =
            (NEXT.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8;
    }
}

fn secret(byte: u8) -> DhchapSecret {
    DhchapSecret::new(&[byte; 32], Some(HashId::Sha256)).unwrap()
}

/// The secret of the host and of the target.
const HOST: u8 = 0xa5;
const TARGET: u8 = 0x5a;

fn access(group: GroupId, host: u8) -> Arc<Access> {
    let rules = AuthRules {
        controller: Some(secret(TARGET)),
        groups: vec![group],
        ..AuthRules::new(random)
    };
    let hosts = BTreeMap::from([(HOSTNQN.to_owned(), HostAccess::BySecret(secret(host)))]);
    Arc::new(Access { hosts: Some(hosts), rules: Some(rules), ..Access::default() })
}

fn world(group: GroupId) -> World {
    let mut world = World::new(&[false]);
    world.host.shared.set_access(access(group, HOST));
    world
}

/// Connects a queue, whose host has to authenticate. Returns the connection and the controller id.
fn connected(w: &mut World, qid: u16, cntlid: u16) -> (usize, u16) {
    let at = w.initialize(Digests::default(), 0);
    let data = peer::connect_data(SUBNQN, HOSTNQN, HOSTID, cntlid);
    let done = w.call(at, peer::connect(0, qid, 31, 0), &data);
    assert_eq!((done.status, done.result & !0xffff), (0, MUST_AUTHENTICATE));
    (at, done.result as u16)
}

fn bytes_of(sqe: &Command) -> peer::Sqe {
    peer::Sqe(sqe.0).byte(1, 0x40)
}

fn send_sqe(cid: u16, len: usize) -> peer::Sqe {
    bytes_of(&Command::auth_send(len as u32)).cid(cid).inline(len as u32)
}

fn receive_sqe(cid: u16) -> peer::Sqe {
    bytes_of(&Command::auth_receive(RECEIVE_BYTES)).cid(cid).transport(RECEIVE_BYTES)
}

fn begin(host: u8, target: Option<u8>) -> (HostAuth, Vec<u8>) {
    let secrets = HostSecrets { host: secret(host), controller: target.map(secret), random };
    HostAuth::begin(Arc::new(secrets), HOSTNQN, SUBNQN)
}

/// Authenticates with these secrets.
fn authenticate(
    w: &mut World,
    at: usize,
    host: u8,
    target: Option<u8>,
) -> Result<(), HostAuthError> {
    let (mut auth, mut message) = begin(host, target);
    loop {
        assert_eq!(w.call(at, send_sqe(1, message.len()), &message).status, 0);
        let (data, done) = w.fetch(at, receive_sqe(2));
        assert_eq!((done.status, data.len()), (0, RECEIVE_BYTES as usize));
        match auth.on_received(&data)? {
            HostStep::SendAndReceive(next) => message = next,
            HostStep::SendLast(last) => {
                assert_eq!(w.call(at, send_sqe(3, last.len()), &last).status, 0);
                return Ok(());
            }
            HostStep::Done => return Ok(()),
        }
    }
}

fn admitted(w: &mut World, qid: u16, cntlid: u16) -> (usize, u16) {
    let (at, cntlid) = connected(w, qid, cntlid);
    authenticate(w, at, HOST, Some(TARGET)).unwrap();
    if qid == 0 {
        assert_eq!(w.call(at, peer::property_set(4, 0x14, CC_ENABLE), &[]).status, 0);
    }
    (at, cntlid)
}

fn logged(w: &World, what: &str) -> usize {
    w.host.log.iter().filter(|line| line.contains(what)).count()
}

#[test]
fn a_host_gets_nothing_before_it_has_authenticated_on_each_queue() {
    for target in [None, Some(TARGET)] {
        for group in [GroupId::Null, GroupId::Ffdhe2048] {
            let mut w = world(group);
            let (admin, cntlid) = connected(&mut w, 0, 0xffff);
            for sqe in [peer::property_get(1, 0, true), peer::identify(1, 1, 0)] {
                let done = w.call(admin, sqe, &[]);
                assert_eq!((done.status, done.dnr), (AUTHENTICATION_REQUIRED, true));
            }
            // Its Connect has made nothing, and is reported when it has effect.
            assert_eq!((w.host.shared.controllers().count(), logged(&w, "Connected")), (0, 0));
            assert!(!w.links[admin].conn.is_admitted());
            authenticate(&mut w, admin, HOST, target).unwrap();
            assert!(w.links[admin].conn.is_admitted());
            assert_eq!((w.host.shared.controllers().count(), logged(&w, "Connected")), (1, 1));
            assert_eq!(w.call(admin, peer::property_set(4, 0x14, CC_ENABLE), &[]).status, 0);

            let (io, _) = connected(&mut w, 1, cntlid);
            let done = w.call(io, peer::write(1, 1, 0, 1), &block(1));
            assert_eq!((done.status, done.sqid), (AUTHENTICATION_REQUIRED, 1));
            authenticate(&mut w, io, HOST, target).unwrap();
            assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(1)).status, 0);
            assert_eq!(w.host.drives[0].block(0), block(1));
            assert_eq!(w.host.drives[0].history.len(), 1, "the refused write did nothing");
        }
    }
}

#[test]
fn a_wrong_secret_ends_the_connection_and_no_line_shows_a_secret() {
    for group in [GroupId::Null, GroupId::Ffdhe2048] {
        let mut w = world(group);
        let (at, _) = connected(&mut w, 0, 0xffff);
        assert!(matches!(
            authenticate(&mut w, at, 1, Some(TARGET)),
            Err(HostAuthError::Refused(_))
        ));
        assert!(w.links[at].closed.is_some());
        assert_eq!(logged(&w, "AuthenticationFailed"), 1);
        assert_eq!(logged(&w, "has another secret"), 1);
        assert_eq!(w.host.shared.controllers().count(), 0);
        let log = w.host.log.join("\n") + &format!("{:?}", w.host.shared.access());
        for shown in ["165", "a5a5", "A5A5", "[1, 1, 1"] {
            assert!(!log.contains(shown), "{shown} in {log}");
        }
    }
}

#[test]
fn a_target_that_cannot_prove_its_identity_is_left() {
    let mut w = world(GroupId::Null);
    let (at, _) = connected(&mut w, 0, 0xffff);
    let Err(HostAuthError::GivenUp(_, failure)) = authenticate(&mut w, at, HOST, Some(1)) else {
        panic!("accepted");
    };
    let (auth, _) = begin(HOST, None);
    let mut message = auth.failure(failure);
    // The number of the running transaction is in the host's last message, and is not checked for this one
    // alone: any other ends the transaction, too.
    message[4] ^= 1;
    w.call(at, send_sqe(3, message.len()), &message);
    assert!(!w.links[at].conn.is_admitted());
    assert_eq!(logged(&w, "AuthenticationFailed"), 1);
}

/// T8: a peer that knows the names of a host cannot end its queues.
#[test]
fn t8_a_peer_without_the_secret_disturbs_no_queue_of_the_host_that_it_names() {
    let mut w = world(GroupId::Null);
    let (admin, cntlid) = admitted(&mut w, 0, 0xffff);
    let (io, _) = admitted(&mut w, 1, cntlid);
    let (rival, _) = connected(&mut w, 1, cntlid);
    assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(1)).status, 0);
    w.hang_up(rival);
    assert!(authenticate_fails(&mut w, cntlid));
    assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(2)).status, 0);
    assert_eq!(w.call(admin, peer::property_get(1, 0x1c, false), &[]).status, 0);
    // The host itself may connect the queue anew, as without authentication.
    let (again, _) = connected(&mut w, 1, cntlid);
    let (auth, message) = begin(HOST, None);
    let status = finish_refused(&mut w, again, auth, message);
    assert_eq!(status, 0x0c, "the old queue ends first");
    assert!(w.links[io].closed.is_some());
    admitted(&mut w, 1, cntlid);
}

fn authenticate_fails(w: &mut World, cntlid: u16) -> bool {
    let (rival, _) = connected(w, 1, cntlid);
    authenticate(w, rival, 1, None).is_err()
}

/// Authenticates up to the last step, which is refused; its status.
fn finish_refused(w: &mut World, at: usize, mut auth: HostAuth, mut message: Vec<u8>) -> u16 {
    loop {
        assert_eq!(w.call(at, send_sqe(1, message.len()), &message).status, 0);
        w.command(at, receive_sqe(2), &[]);
        let pdu = w.next(at).expect("an answer");
        if pdu.kind == 0x05 {
            return pdu.completion().status;
        }
        assert_eq!(w.next(at).expect("a completion").completion().status, 0);
        match auth.on_received(&pdu.data) {
            Ok(HostStep::SendAndReceive(next)) => message = next,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_message_waits_for_its_exponentiation_without_a_time_limit() {
    let mut w = world(GroupId::Ffdhe2048);
    let (at, _) = connected(&mut w, 0, 0xffff);
    let (mut auth, message) = begin(HOST, None);
    w.hold_mail = true;
    assert_eq!(w.call(at, send_sqe(1, message.len()), &message).status, 0);
    w.command(at, receive_sqe(2), &[]);
    assert!(w.next(at).is_none(), "the exponentiation is running");
    // One command after the other.
    assert_eq!(w.call(at, receive_sqe(3), &[]).status, 0x0c);
    w.host.now += 10 * AUTHENTICATION_NS;
    w.tick();
    assert!(w.links[at].closed.is_none(), "the time is the target's");
    w.hold_mail = false;
    w.deliver();
    let challenge = w.next(at).expect("a challenge");
    assert_eq!(w.next(at).expect("a completion").completion().cid, 2);
    let Ok(HostStep::SendAndReceive(reply)) = auth.on_received(&challenge.data) else { panic!() };
    assert_eq!(w.call(at, send_sqe(1, reply.len()), &reply).status, 0);
    let (data, _) = w.fetch(at, receive_sqe(2));
    assert!(matches!(auth.on_received(&data), Ok(HostStep::Done)));
    assert!(w.links[at].conn.is_admitted());
}

#[test]
fn t28_a_host_has_a_limited_time_to_authenticate() {
    let mut w = world(GroupId::Null);
    let (at, _) = connected(&mut w, 0, 0xffff);
    let begin = w.host.now;
    // A host may compute for a while between two messages.
    w.host.now += AUTHENTICATION_NS / 2;
    w.tick();
    assert!(w.links[at].closed.is_none());
    while w.links[at].closed.is_none() {
        assert!(w.host.now < begin + 2 * AUTHENTICATION_NS, "no limit");
        w.host.now += STALL_NS / 2;
        // Nor does another attempt.
        let (_, message) = self::begin(HOST, None);
        w.command(at, send_sqe(2, message.len()), &message);
        // What is refused does not extend the limit.
        w.command(at, peer::property_get(1, 0, true), &[]);
        w.tick();
    }
    assert_eq!(logged(&w, "the host did not authenticate in time"), 2);
}

#[test]
fn a_host_may_authenticate_again_and_must_then_succeed() {
    let mut w = world(GroupId::Null);
    let (admin, cntlid) = admitted(&mut w, 0, 0xffff);
    let (io, _) = admitted(&mut w, 1, cntlid);
    for at in [admin, io] {
        authenticate(&mut w, at, HOST, Some(TARGET)).unwrap();
    }
    assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(1)).status, 0);
    // The secret is changed: the queues stay, until they authenticate again with the old one.
    w.host.shared.set_access(access(GroupId::Null, 7));
    assert_eq!(w.call(io, peer::write(1, 1, 0, 1), &block(2)).status, 0);
    authenticate(&mut w, io, 7, Some(TARGET)).unwrap();
    assert!(authenticate(&mut w, admin, HOST, Some(TARGET)).is_err());
    assert!(w.links[admin].closed.is_some() && w.links[io].closed.is_some());
}

#[test]
fn t28_a_transaction_on_a_queue_has_a_limited_time_too() {
    let mut w = world(GroupId::Null);
    let (at, _) = admitted(&mut w, 0, 0xffff);
    w.host.now += 100 * AUTHENTICATION_NS;
    w.tick();
    assert!(w.links[at].closed.is_none());
    let (_, message) = begin(HOST, None);
    assert_eq!(w.call(at, send_sqe(1, message.len()), &message).status, 0);
    w.host.now += AUTHENTICATION_NS;
    w.tick();
    assert!(w.links[at].closed.is_some());
}

#[test]
fn a_removed_host_ends_at_its_next_step() {
    let mut w = world(GroupId::Null);
    let (at, _) = connected(&mut w, 0, 0xffff);
    w.host.shared.set_access(Access::by_name([]));
    let (_, message) = begin(HOST, None);
    w.call(at, send_sqe(1, message.len()), &message);
    assert!(w.links[at].closed.is_some());
    assert_eq!(logged(&w, "the secret of the host was removed"), 1);
}

#[test]
fn t18_commands_with_wrong_fields_are_refused() {
    let mut w = world(GroupId::Null);
    let (at, _) = connected(&mut w, 0, 0xffff);
    let (_, message) = begin(HOST, None);
    let len = message.len() as u32;
    let send = send_sqe(1, message.len());
    for (sqe, status) in [
        // Another security protocol, then two other specific fields.
        (send.byte(43, 0), 0x02),
        (send.byte(42, 0), 0x02),
        (send.byte(41, 2), 0x02),
        // A length that is not that of the data.
        (send.dword(11, len - 1), 0x0f),
    ] {
        assert_eq!(w.call(at, sqe, &message).status, status);
    }
    let by_r2t = bytes_of(&Command::auth_send(len)).cid(1).transport(len);
    assert_eq!(w.call(at, by_r2t, &[]).status, 0x11);
    for (al, buffer, status) in [(0, 0, 0x02), (1 << 20, 1 << 20, 0x02), (64, 63, 0x0f)] {
        let sqe = bytes_of(&Command::auth_receive(al)).cid(1).transport(buffer);
        assert_eq!(w.call(at, sqe, &[]).status, status, "AL {al}");
    }
    // None of that was a step of the authentication.
    authenticate(&mut w, at, HOST, None).unwrap();
}

#[test]
fn a_host_without_a_secret_has_no_authentication() {
    let mut w = World::new(&[false]);
    let (admin, _) = w.admin();
    let (_, message) = begin(HOST, None);
    assert_eq!(w.call(admin, send_sqe(1, message.len()), &message).status, 0x01);
    assert_eq!(w.call(admin, receive_sqe(1), &[]).status, 0x01);
}
