//! Both ends over loopback: the right key, wrong ones, peers without TLS, and bytes that change on the way.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use riopipe_net::{
    LinkError, Listener, Received, Socket, SocketOptions, connect as connect_tcp, wait_readable,
    wait_writable,
};
use riopipe_nvme::auth::HashId;
use riopipe_nvme::tls_psk::TlsPsk;
use riopipe_session::auth::tls::{Demand, KeyRing, keys};
use riopipe_tls::{Door, LinkEnd, Relay, TlsError, connect};

/// Much longer than anything takes.
const SOON: Duration = Duration::from_secs(60);
const HOST: &str = "nqn.2026-01.io.example:host";
const SUBSYSTEM: &str = "nqn.2026-01.io.example:drives";

fn psk(byte: u8) -> TlsPsk {
    TlsPsk::new(&[byte; 32], Some(HashId::Sha256)).unwrap()
}

/// A target with the keys of one host, and an initiator.
struct Ends {
    relay: Relay,
    door: Arc<Door>,
    listener: Listener,
    demand: Demand,
}

impl Ends {
    fn new(psk: &TlsPsk) -> Self {
        let mut ring = KeyRing::default();
        ring.add(psk, HOST, SUBSYSTEM);
        Self {
            relay: Relay::start().unwrap(),
            door: Arc::new(Door::new(ring).unwrap()),
            listener: Listener::bind("127.0.0.1:0").unwrap(),
            demand: Demand::Required,
        }
    }

    fn address(&self) -> String {
        self.listener.local_addr().to_string()
    }

    fn accept(&self) -> (Socket, Arc<LinkEnd>) {
        assert!(wait_readable(self.listener.as_fd(), SOON).unwrap());
        let socket = self.listener.accept().unwrap().unwrap();
        self.door.accept(&self.relay, socket, self.demand).unwrap()
    }

    fn dial(&self, address: &str, psk: &TlsPsk, hostnqn: &str) -> Result<Socket, TlsError> {
        let socket = connect_tcp(address, SOON, &SocketOptions::default()).unwrap();
        connect(&self.relay, socket, &keys(psk, hostnqn, SUBSYSTEM), SOON)
    }

    /// Connects with a key, and accepts at the same time.
    fn pair(
        &self,
        address: &str,
        psk: &TlsPsk,
        hostnqn: &str,
    ) -> (Result<Socket, TlsError>, Socket, Arc<LinkEnd>) {
        thread::scope(|scope| {
            let near = scope.spawn(|| self.dial(address, psk, hostnqn));
            let (far, end) = self.accept();
            (near.join().unwrap(), far, end)
        })
    }
}

fn recv(socket: &Socket, into: &mut [u8]) -> Result<Received, LinkError> {
    loop {
        match socket.recv(into)? {
            Received::WouldBlock => {
                assert!(wait_readable(socket.as_fd(), SOON).unwrap(), "nothing came");
            }
            received => return Ok(received),
        }
    }
}

/// Receives until the end.
fn recv_all(socket: &Socket) -> Result<Vec<u8>, LinkError> {
    let (mut all, mut chunk) = (Vec::new(), vec![0; 50_000]);
    while let Received::Bytes(count) = recv(socket, &mut chunk)? {
        all.extend_from_slice(&chunk[..count]);
    }
    Ok(all)
}

fn send_all(socket: &Socket, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match socket.send([bytes]).unwrap() {
            0 => assert!(wait_writable(socket.as_fd(), SOON).unwrap(), "the peer takes nothing"),
            count => bytes = &bytes[count..],
        }
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect()
}

#[test]
fn bytes_pass_in_both_directions_and_the_host_is_known() {
    for psk in [
        psk(1),
        TlsPsk::new(&[2; 48], Some(HashId::Sha384)).unwrap(),
        TlsPsk::new(&[3; 32], None).unwrap(),
        TlsPsk::new(&[4; 48], None).unwrap(),
    ] {
        let ends = Ends::new(&psk);
        let (near, far, end) = ends.pair(&ends.address(), &psk, HOST);
        let near = near.unwrap();
        let mut chunk = [0; 100];
        send_all(&near, b"from the host");
        assert_eq!(recv(&far, &mut chunk).unwrap(), Received::Bytes(13));
        assert_eq!(&chunk[..13], b"from the host");
        let admitted = end.admitted().unwrap();
        assert_eq!((&admitted.hostnqn[..], &admitted.subnqn[..]), (HOST, SUBSYSTEM));
        send_all(&far, b"answer");
        assert_eq!(recv(&near, &mut chunk).unwrap(), Received::Bytes(6));
        assert_eq!(near.peer(), ends.listener.local_addr());
        assert_eq!(far.local_addr().unwrap(), ends.listener.local_addr());
        assert_eq!(far.peer(), near.local_addr().unwrap());
    }
}

#[test]
fn much_in_both_directions_at_once_arrives_whole_and_in_order() {
    let ends = Ends::new(&psk(1));
    let (near, far, _) = ends.pair(&ends.address(), &psk(1), HOST);
    let near = near.unwrap();
    let data = pattern(24 << 20);
    thread::scope(|scope| {
        for socket in [&near, &far] {
            let data = &data;
            scope.spawn(move || {
                send_all(socket, data);
                socket.finish_sending();
            });
            scope.spawn(move || assert!(recv_all(socket).unwrap() == *data));
        }
    });
}

#[test]
fn a_peer_that_takes_nothing_holds_back_the_sender() {
    let ends = Ends::new(&psk(1));
    let (near, far, _) = ends.pair(&ends.address(), &psk(1), HOST);
    let near = near.unwrap();
    let data = pattern(64 << 20);
    let mut sent = 0;
    // The peer does not receive: the kernel's buffers fill, and the relay holds no more than a bounded rest.
    while sent < data.len() {
        match near.send([&data[sent..]]).unwrap() {
            0 if !wait_writable(near.as_fd(), Duration::from_secs(2)).unwrap() => break,
            count => sent += count,
        }
    }
    assert!(sent < data.len(), "all {sent} bytes were taken, and none was received");
    thread::scope(|scope| {
        scope.spawn(|| {
            send_all(&near, &data[sent..]);
            near.finish_sending();
        });
        assert!(recv_all(&far).unwrap() == data);
    });
}

#[test]
fn the_last_bytes_arrive_after_the_sender_has_dropped_its_socket() {
    let ends = Ends::new(&psk(1));
    for bytes in [1, 100_000] {
        let (near, far, _) = ends.pair(&ends.address(), &psk(1), HOST);
        let data = pattern(bytes);
        send_all(near.as_ref().unwrap(), &data);
        drop(near);
        assert!(recv_all(&far).unwrap() == data);
        let (near, far, _) = ends.pair(&ends.address(), &psk(1), HOST);
        send_all(&far, &data);
        drop(far);
        assert!(recv_all(&near.unwrap()).unwrap() == data);
    }
}

#[test]
fn a_wrong_key_and_an_unknown_host_are_named_at_both_ends() {
    let ends = Ends::new(&psk(1));
    // The identity of version 1 follows from the key, so a wrong key is an unknown identity; that of version 0
    // does not, and is offered, too.
    let (near, far, end) = ends.pair(&ends.address(), &psk(2), HOST);
    assert!(matches!(near, Err(TlsError::WrongKey)), "{near:?}");
    let error = recv(&far, &mut [0; 10]).unwrap_err().to_string();
    assert!(error.contains("does not have the key") && error.contains(HOST), "{error}");
    assert_eq!(end.admitted(), None);

    let (near, far, end) = ends.pair(&ends.address(), &psk(1), "nqn.2026-01.io.example:other");
    assert!(matches!(near, Err(TlsError::UnknownKey)), "{near:?}");
    let error = recv(&far, &mut [0; 10]).unwrap_err().to_string();
    assert!(error.contains("no key of TLS") && error.contains(":other"), "{error}");
    assert_eq!(end.admitted(), None);
    // The target goes on.
    let (near, ..) = ends.pair(&ends.address(), &psk(1), HOST);
    near.unwrap();
}

#[test]
fn keys_are_replaced_for_later_connections() {
    let ends = Ends::new(&psk(1));
    let (near, far, _) = ends.pair(&ends.address(), &psk(1), HOST);
    let near = near.unwrap();
    ends.door.set_keys(KeyRing::default());
    let (refused, ..) = ends.pair(&ends.address(), &psk(1), HOST);
    assert!(matches!(refused, Err(TlsError::UnknownKey)), "{refused:?}");
    send_all(&near, b"still here");
    assert_eq!(recv(&far, &mut [0; 100]).unwrap(), Received::Bytes(10));
}

#[test]
fn a_host_without_tls_is_refused_or_served_as_the_port_has_it() {
    let mut ends = Ends::new(&psk(1));
    // An ICReq begins with a zero.
    let hello = [0, 0, 128, 0];
    let plain = |ends: &Ends| {
        let mut plain = TcpStream::connect(ends.address()).unwrap();
        plain.write_all(&hello).unwrap();
        let (far, end) = ends.accept();
        (plain, far, end)
    };
    let (mut host, far, end) = plain(&ends);
    let error = recv(&far, &mut [0; 10]).unwrap_err().to_string();
    assert!(error.contains("without TLS"), "{error}");
    assert_eq!(end.admitted(), None);
    // Unread bytes reset the connection. Either way it has ended.
    assert!(matches!(host.read(&mut [0; 10]), Ok(0) | Err(_)));

    ends.demand = Demand::Allowed;
    let (mut host, far, end) = plain(&ends);
    let mut chunk = [0; 10];
    assert_eq!(recv(&far, &mut chunk).unwrap(), Received::Bytes(4));
    assert_eq!((&chunk[..4], end.admitted()), (&hello[..], None));
    send_all(&far, b"answer");
    far.finish_sending();
    let mut answer = Vec::new();
    host.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"answer");
    // And a host with TLS on the same port.
    let (near, far, end) = ends.pair(&ends.address(), &psk(1), HOST);
    send_all(&near.unwrap(), b"x");
    assert_eq!(recv(&far, &mut chunk).unwrap(), Received::Bytes(1));
    assert!(end.admitted().is_some());
}

#[test]
fn a_target_without_tls_is_named() {
    let ends = Ends::new(&psk(1));
    let target = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = target.local_addr().unwrap().to_string();
    let plain = thread::spawn(move || {
        let (mut stream, _) = target.accept().unwrap();
        let mut first = [0; 8];
        stream.read_exact(&mut first).unwrap();
        // A C2HTermReq, by which a target ends a connection, is of type 3.
        stream.write_all(&[3, 0, 24, 0, 152, 0, 0, 0, 1, 0, 0, 0]).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let result = ends.dial(&address, &psk(1), HOST);
    assert!(matches!(result, Err(TlsError::PlainTarget)), "{result:?}");
    plain.join().unwrap();
}

#[test]
fn a_handshake_that_does_not_end_is_given_up() {
    let ends = Ends::new(&psk(1));
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket =
        connect_tcp(&silent.local_addr().unwrap().to_string(), SOON, &SocketOptions::default());
    let start = Instant::now();
    let limit = Duration::from_millis(300);
    let result = connect(&ends.relay, socket.unwrap(), &keys(&psk(1), HOST, SUBSYSTEM), limit);
    assert!(matches!(result, Err(TlsError::TimedOut)), "{result:?}");
    assert!(start.elapsed() >= limit);
}

/// A host that begins a handshake and goes no further costs the target a connection, until the target gives
/// it up by dropping its socket.
#[test]
fn to_drop_the_socket_ends_a_handshake() {
    let ends = Ends::new(&psk(1));
    for sent in [&[][..], &[22, 3, 1, 0, 200, 1, 0]] {
        let mut host = TcpStream::connect(ends.address()).unwrap();
        host.write_all(sent).unwrap();
        let (far, _) = ends.accept();
        host.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let waits = host.read(&mut [0; 10]).unwrap_err();
        assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock, "the target waits for the rest");
        drop(far);
        host.set_read_timeout(Some(SOON)).unwrap();
        assert!(matches!(host.read(&mut [0; 10]), Ok(0) | Err(_)), "the connection has ended");
    }
}

#[test]
fn the_end_of_the_relay_ends_its_connections() {
    let mut ends = Ends::new(&psk(1));
    let (near, far, _) = ends.pair(&ends.address(), &psk(1), HOST);
    let near = near.unwrap();
    ends.relay = Relay::start().unwrap();
    for socket in [near, far] {
        assert!(matches!(recv(&socket, &mut [0; 10]), Ok(Received::Closed) | Err(_)));
    }
}

/// The fault of a network between the two, after the handshake.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Flip(usize),
    CutAfter(usize),
}

/// A network between the two. It passes on the handshake as it is, and the records that follow with a fault.
fn faulty(target: String, fault: Fault) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let (host, _) = listener.accept().unwrap();
        let target = TcpStream::connect(target).unwrap();
        let (mut from_target, mut to_host) =
            (target.try_clone().unwrap(), host.try_clone().unwrap());
        thread::spawn(move || {
            let _ = std::io::copy(&mut from_target, &mut to_host);
            let _ = to_host.shutdown(Shutdown::Both);
        });
        let (mut host, mut target) = (host, target);
        // Each record is passed on by itself: the two of the handshake (ClientHello, Finished), with the
        // ChangeCipherSpec for old machines between them, and then data.
        let mut ciphered = 0;
        loop {
            let mut header = [0; 5];
            if host.read_exact(&mut header).is_err() {
                break;
            }
            let mut record = header.to_vec();
            record.resize(5 + usize::from(u16::from_be_bytes([header[3], header[4]])), 0);
            host.read_exact(&mut record[5..]).unwrap();
            ciphered += usize::from(header[0] == 23);
            // The first ciphered record is the host's Finished.
            if ciphered > 1 {
                match fault {
                    Fault::Flip(at) => {
                        let at = at % record.len();
                        record[at] ^= 1;
                    }
                    Fault::CutAfter(len) => {
                        target.write_all(&record[..len.min(record.len())]).unwrap();
                        break;
                    }
                }
            }
            if target.write_all(&record).is_err() {
                break;
            }
        }
        let _ = target.shutdown(Shutdown::Both);
        let _ = host.shutdown(Shutdown::Both);
    });
    address
}

#[test]
fn a_flipped_bit_anywhere_in_a_record_ends_the_connection_and_no_byte_of_it_is_delivered() {
    let ends = Ends::new(&psk(1));
    // The header of a record, its content, its last bytes (the authentication tag).
    for at in [0, 1, 3, 4, 5, 20, 1000, 1020, 1021] {
        let way = faulty(ends.address(), Fault::Flip(at));
        let (near, far, _) = ends.pair(&way, &psk(1), HOST);
        let near = near.unwrap();
        send_all(&near, &pattern(1000));
        near.finish_sending();
        match recv_all(&far) {
            Ok(bytes) => assert_eq!(bytes, [], "bit flipped at {at}"),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("not valid, or was changed"), "flipped at {at}: {error}");
            }
        }
    }
}

#[test]
fn a_record_that_is_cut_is_not_delivered() {
    let ends = Ends::new(&psk(1));
    for len in [0, 1, 5, 6, 500, 1021] {
        let way = faulty(ends.address(), Fault::CutAfter(len));
        let (near, far, _) = ends.pair(&way, &psk(1), HOST);
        send_all(&near.unwrap(), &pattern(1000));
        if let Ok(bytes) = recv_all(&far) {
            assert_eq!(bytes, [], "cut after {len}");
        }
    }
}

/// No error and no formatting has the key, in any form.
#[test]
fn no_message_has_a_key() {
    let ends = Ends::new(&psk(1));
    let text = psk(1).to_text();
    let base64 = text.split(':').nth(2).unwrap();
    let (near, far, end) = ends.pair(&ends.address(), &psk(2), HOST);
    let shown = format!("{near:?} {end:?} {:?} {:?}", recv(&far, &mut [0; 10]), ends.door);
    assert!(!shown.contains(base64) && !shown.contains("1, 1, 1"), "{shown}");
}
