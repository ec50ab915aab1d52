//! The NBD server, with a client that writes its bytes by itself.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use riopipe::EngineKind;
use riopipe_attach::{NbdAddress, NbdServer};

use crate::site::{SOON, Site, connect};

const READ: u16 = 0;
const WRITE: u16 = 1;
const FLUSH: u16 = 3;
const TRIM: u16 = 4;
const WRITE_ZEROES: u16 = 6;
const FUA: u16 = 1;

/// A connection after `NBD_OPT_GO`.
struct Client<S> {
    socket: S,
    bytes: u64,
    handle: u64,
}

impl<S: Read + Write> Client<S> {
    fn new(mut socket: S, name: &str) -> Self {
        let mut greeting = [0; 18];
        socket.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        let mut hello = 3_u32.to_be_bytes().to_vec();
        hello.extend(b"IHAVEOPT");
        hello.extend(7_u32.to_be_bytes());
        hello.extend((name.len() as u32 + 6).to_be_bytes());
        hello.extend((name.len() as u32).to_be_bytes());
        hello.extend(name.as_bytes());
        hello.extend(0_u16.to_be_bytes());
        socket.write_all(&hello).unwrap();
        let mut bytes = 0;
        loop {
            let mut header = [0; 20];
            socket.read_exact(&mut header).unwrap();
            let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
            let mut data = vec![0; word(16) as usize];
            socket.read_exact(&mut data).unwrap();
            match (word(12), data.first_chunk()) {
                (1, _) => return Self { socket, bytes, handle: 0 },
                (3, Some([0, 0])) => bytes = u64::from_be_bytes(data[2..10].try_into().unwrap()),
                (3, Some([0, 3])) => assert_eq!(data[2..6], 4096_u32.to_be_bytes()),
                other => panic!("{other:?}"),
            }
        }
    }

    fn send(&mut self, flags: u16, kind: u16, offset: u64, len: u32, data: &[u8]) -> u64 {
        self.handle += 1;
        let mut bytes = 0x2560_9513_u32.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(self.handle.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend(data);
        self.socket.write_all(&bytes).unwrap();
        self.handle
    }

    /// The handle and the error number of the next reply, which has no data.
    fn reply(&mut self) -> (u64, u32) {
        let mut header = [0; 16];
        self.socket.read_exact(&mut header).unwrap();
        assert_eq!(header[..4], 0x6744_6698_u32.to_be_bytes());
        let error = u32::from_be_bytes(header[4..8].try_into().unwrap());
        (u64::from_be_bytes(header[8..].try_into().unwrap()), error)
    }

    fn request(&mut self, flags: u16, kind: u16, offset: u64, len: u32, data: &[u8]) -> u32 {
        let handle = self.send(flags, kind, offset, len, data);
        let (answered, error) = self.reply();
        assert_eq!(answered, handle);
        error
    }

    fn read(&mut self, offset: u64, len: u32) -> Vec<u8> {
        assert_eq!(self.request(0, READ, offset, len, &[]), 0);
        let mut data = vec![0; len as usize];
        self.socket.read_exact(&mut data).unwrap();
        data
    }
}

fn tcp(address: &NbdAddress) -> TcpStream {
    let socket = TcpStream::connect(address.to_string()).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    socket
}

#[test]
fn an_nbd_client_uses_it_as_a_drive() {
    let site = Site::new(EngineKind::Rio, "ssd:flash,size=24M,seed=#", "1M");
    let device = site.open(connect());
    let server = NbdServer::start(&device, &NbdAddress::Tcp("127.0.0.1".into(), 0)).unwrap();
    let uri = server.address().uri(&device.info().name);
    assert_eq!(uri, format!("nbd://{}/plain", server.address()));
    let mut client = Client::new(tcp(server.address()), "plain");
    assert_eq!(client.bytes, device.info().blocks * 4096);
    // Over the end of a range, and more than a group.
    let data: Vec<u8> = (0..3_000_000_usize / 4096 * 4096).map(|n| (n / 7) as u8).collect();
    let at = 4 * 1024 * 1024 - 40_960;
    assert_eq!(client.request(0, WRITE, at, data.len() as u32, &data), 0);
    assert_eq!(client.request(0, FLUSH, 0, 0, &[]), 0);
    assert!(client.read(at, data.len() as u32) == data);
    assert_eq!(client.request(FUA, WRITE, 0, 4096, &[9; 4096]), 0);
    assert_eq!(client.request(FUA, TRIM, at, 8192, &[]), 0);
    assert_eq!(client.request(FUA, WRITE_ZEROES, at + 8192, 4096, &[]), 0);
    let found = client.read(at, 16384);
    assert!(found[..12288] == [0; 12288] && found[12288..] == data[12288..16384]);
    assert_eq!(client.request(0, READ, 512, 512, &[]), 22, "EINVAL");

    // Many at once, from two connections. The empty name is the default export.
    let mut other = Client::new(tcp(server.address()), "");
    let handles: Vec<u64> =
        (0..500).map(|n| client.send(0, WRITE, n * 4096, 4096, &[n as u8; 4096])).collect();
    let mut answered: Vec<u64> = handles.iter().map(|_| client.reply()).map(|(h, _)| h).collect();
    answered.sort_unstable();
    assert_eq!(answered, handles);
    assert_eq!(other.request(0, FLUSH, 0, 0, &[]), 0);
    assert!(other.read(499 * 4096, 4096) == [499_u32 as u8; 4096]);

    // A client that goes in the midst of its requests, and one that sends nonsense.
    for n in 0..50 {
        other.send(0, WRITE, n * 4096, 4096, &[1; 4096]);
    }
    drop(other);
    let mut nonsense = tcp(server.address());
    nonsense.write_all(&[0xa5; 4096]).unwrap();
    let mut rest = Vec::new();
    // The server closes the connection, with an error if bytes were not received.
    let _ = nonsense.read_to_end(&mut rest);
    assert!(client.read(0, 4096).iter().all(|byte| [0, 1].contains(byte)));
    server.stop();
    device.close().unwrap();
    let device = site.open(connect());
    assert_eq!(device.failure(), None);
    device.close().unwrap();
}

#[test]
fn a_unix_socket_is_taken_over_from_a_dead_process_only() {
    let site = Site::new(EngineKind::Rio, "mem:16M", "1M");
    let device = site.open(connect());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nbd socket");
    let address = NbdAddress::Unix(path.clone());
    assert!(address.uri("a b").starts_with("nbd+unix:///a%20b?socket=/"));
    // The socket of a process that has died.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = NbdServer::start(&device, &address).unwrap();
    let socket = UnixStream::connect(&path).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let mut client = Client::new(socket, "");
    assert_eq!(client.request(FUA, WRITE, 4096, 4096, &[3; 4096]), 0);
    assert!(NbdServer::start(&device, &address).is_err(), "it is in use");
    assert!(client.read(4096, 4096) == [3; 4096]);
    server.stop();
    assert!(!path.exists());
    std::fs::write(&path, "a file").unwrap();
    assert!(NbdServer::start(&device, &address).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"a file");
    device.close().unwrap();
}

/// A client gets errors from a device that has failed, and no silence.
#[test]
fn p6_an_nbd_client_gets_errors_from_a_failed_device() {
    let mut site = Site::new(EngineKind::Rio, "ssd:flash,size=24M,seed=#", "1M");
    let device = site
        .open(riopipe::ConnectOptions { loss_timeout: Duration::from_millis(300), ..connect() });
    let server = NbdServer::start(&device, &NbdAddress::Tcp("127.0.0.1".into(), 0)).unwrap();
    let mut client = Client::new(tcp(server.address()), "");
    assert_eq!(client.request(0, WRITE, 0, 65536, &[1; 65536]), 0);
    site.kill(0);
    let wrote = client.request(FUA, WRITE, 0, 1 << 20, &vec![2; 1 << 20]);
    assert_eq!(wrote, 5, "EIO");
    assert_eq!(client.request(0, FLUSH, 0, 0, &[]), 5);
    server.stop();
    assert!(device.close().is_err());
}
